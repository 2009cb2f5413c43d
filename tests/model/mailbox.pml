/* The ring and the doorbells of csrc/transport/shm/mailbox.cpp and segment.cpp.
 *
 * A sender posts letters into a ring with little room, the receiver takes them in order. Whoever
 * finds nothing to do sleeps until its doorbell rings, without a time limit: a ring that goes
 * unheard is a deadlock.
 */
#define ROOM 2
#define LETTERS 5
#define SENDER 0
#define RECEIVER 1

byte ring[ROOM];
byte written, read;
bool wants_room;
byte doorbell[2], announced[2];
bool asleep[2];

inline ring_bell(who) {
  doorbell[who]++;
  if :: announced[who] != 0 -> asleep[who] = false :: else fi
}

inline await_ring(me) {
#ifdef FAULT_SLEEPS_UNANNOUNCED
  atomic { if :: doorbell[me] == seen -> asleep[me] = true :: else fi };
  announced[me]++;
#else
  announced[me]++;
  atomic { if :: doorbell[me] == seen -> asleep[me] = true :: else fi };
#endif
  !asleep[me];
  announced[me]--
}

proctype sender() {
  byte seen, letter = 0;
  do
  :: letter == LETTERS -> break
  :: else ->
     seen = doorbell[SENDER];
     if
     :: written - read < ROOM -> goto post
     :: else
     fi;
     wants_room = true;
#ifndef FAULT_NO_SECOND_LOOK
     if
     :: written - read < ROOM -> goto post
     :: else
     fi;
#endif
     await_ring(SENDER);
     goto next;
post:
     ring[written % ROOM] = letter + 1;
     written++;
     ring_bell(RECEIVER);
     letter++;
next:
     skip
  od
}

proctype receiver() {
  byte seen, letter = 0;
  bool wanted;
  do
  :: letter == LETTERS -> break
  :: else ->
#ifndef FAULT_READS_BELL_LATE
     seen = doorbell[RECEIVER];
#endif
     if
     :: written != read ->
        assert(ring[read % ROOM] == letter + 1);
        read++;
        if
        :: wants_room -> atomic { wanted = wants_room; wants_room = false };
           if :: wanted -> ring_bell(SENDER) :: else fi
        :: else
        fi;
        letter++
     :: else ->
#ifdef FAULT_READS_BELL_LATE
        seen = doorbell[RECEIVER];
#endif
        await_ring(RECEIVER)
     fi
  od
}

init { atomic { run sender(); run receiver() } }
