/* The barrier of csrc/transport/shm/segment.cpp and the staging parity that rests on it.
 *
 * Every rank writes its own staging copy, passes one barrier and reads everybody's; the next step
 * uses the other copy, so no second barrier follows the reading. Each statement is one access to
 * shared memory. A futex sleeps only while the word has the expected value, and without ABORT it
 * has no time limit here: whoever is not woken sleeps for ever, which is a deadlock.
 */
#ifndef N
#define N 3
#endif
#define STEPS 5

byte arrived, epoch, sleepers;
bool asleep[N];
byte staging[2 * N];
bool aborted;
byte ended;

inline wake_all() {
  atomic { i = 0; do :: i < N -> asleep[i] = false; i++ :: else -> break od }
}

inline barrier() {
  now = epoch;
#ifdef FAULT_EPOCH_BEFORE_COUNT
  atomic { arrived++; last = (arrived == N) };
  if
  :: last -> epoch = now + 1; arrived = 0;
#else
  atomic { arrived++; last = (arrived == N) };
  if
  :: last -> arrived = 0; epoch = now + 1;
#endif
     if :: sleepers != 0 -> wake_all() :: else fi
  :: else ->
     do
     :: epoch != now -> break
     :: else ->
        if :: aborted -> goto failed :: else fi;
#ifdef FAULT_SLEEPS_UNANNOUNCED
        atomic { if :: epoch == now -> asleep[me] = true :: else fi };
        sleepers++;
#else
        sleepers++;
#ifdef FAULT_SLEEPS_UNSEEING
        asleep[me] = true;
#else
        atomic { if :: epoch == now -> asleep[me] = true :: else fi };
#endif
#endif
#ifdef ABORT
        if :: !asleep[me] :: asleep[me] -> asleep[me] = false fi;  /* a slice of time is over */
#else
        !asleep[me];
#endif
        sleepers--
     od
  fi
}

proctype rank(byte me) {
  byte step = 0, peer, now, i, copy;
  bool last;
  do
  :: step == STEPS -> break
  :: else ->
#ifdef FAULT_ONE_COPY
     copy = 0;
#else
     copy = (step % 2) * N;
#endif
     staging[copy + me] = step + 1;
     barrier();
     peer = 0;
     do
     :: peer == N -> break
     :: else -> assert(staging[copy + peer] == step + 1); peer++
     od;
     step++
  od;
failed:
  ended++
}

#ifdef ABORT
proctype aborter() {
  byte i;
  aborted = true;
  wake_all()
}
#endif

init {
  byte r = 0;
  atomic {
    do :: r == N -> break :: else -> run rank(r); r++ od;
#ifdef ABORT
    run aborter()
#endif
  };
  ended == N
}
