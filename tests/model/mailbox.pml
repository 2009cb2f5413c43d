/* The rings and the doorbells of csrc/transport/shm/mailbox.cpp and segment.cpp, as
 * csrc/comm/message_exchange.cpp uses them.
 *
 * A sender announces messages in a ring with little room and wants an answer to each; the receiver
 * takes them in order and answers in a ring with less room. Neither stops reading because it can't
 * write. Whoever finds nothing to do sleeps until its doorbell rings, without a time limit: a ring
 * that goes unheard is a deadlock, as is a wait for room that the other side does not make.
 */
#define LETTER_ROOM 2
#define REPLY_ROOM 1
#define LETTERS 5
#define SENDER 0
#define RECEIVER 1

typedef Flow { byte written; byte read; bool wants_room };

Flow letters, replies;
byte letter_in[LETTER_ROOM], reply_in[REPLY_ROOM];
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

inline look_for_room(flow, capacity) {
  room = flow.written - flow.read < capacity;
  if
  :: room
  :: else ->
     flow.wants_room = true;
#ifndef FAULT_NO_SECOND_LOOK
     room = flow.written - flow.read < capacity
#endif
  fi
}

inline advance(flow) {
  flow.read++;
  wanted = false;
  if
  :: flow.wants_room -> atomic { wanted = flow.wants_room; flow.wants_room = false }
  :: else
  fi
}

proctype sender() {
  byte seen, posted = 0, answered = 0;
  bool room, wanted, moved;
  do
  :: answered == LETTERS -> break
  :: else ->
     seen = doorbell[SENDER];
     moved = false;
#ifdef FAULT_WRITES_BEFORE_IT_READS
     if :: posted < LETTERS -> goto post :: else fi;
#endif
     do
     :: replies.written != replies.read ->
        assert(reply_in[replies.read % REPLY_ROOM] == answered + 1);
        advance(replies);
#ifndef FAULT_TAKES_IN_SILENCE
        if :: wanted -> ring_bell(RECEIVER) :: else fi;
#endif
        answered++;
        moved = true
     :: else -> break
     od;
post:
     do
     :: posted == LETTERS -> break
     :: else ->
        look_for_room(letters, LETTER_ROOM);
        if
        :: room ->
           letter_in[letters.written % LETTER_ROOM] = posted + 1;
           letters.written++;
           ring_bell(RECEIVER);
           posted++;
           moved = true
        :: else -> break
        fi
     od;
     if :: moved :: else -> await_ring(SENDER) fi
  od
}

proctype receiver() {
  byte seen, taken = 0, given = 0;
  bool room, wanted, moved;
  do
  :: given == LETTERS -> break
  :: else ->
#ifndef FAULT_READS_BELL_LATE
     seen = doorbell[RECEIVER];
#endif
     moved = false;
     do
     :: given < taken ->
        look_for_room(replies, REPLY_ROOM);
        if
        :: room ->
           reply_in[replies.written % REPLY_ROOM] = given + 1;
           replies.written++;
           ring_bell(SENDER);
           given++;
           moved = true
        :: else -> break
        fi
     :: else -> break
     od;
#ifdef FAULT_WRITES_BEFORE_IT_READS
     if :: given < taken -> goto idle :: else fi;
#endif
     do
     :: letters.written != letters.read ->
        assert(letter_in[letters.read % LETTER_ROOM] == taken + 1);
        advance(letters);
        if :: wanted -> ring_bell(SENDER) :: else fi;
        taken++;
        moved = true
     :: else -> break
     od;
idle:
#ifdef FAULT_READS_BELL_LATE
     seen = doorbell[RECEIVER];
#endif
     if :: moved :: else -> await_ring(RECEIVER) fi
  od
}

init { atomic { run sender(); run receiver() } }
