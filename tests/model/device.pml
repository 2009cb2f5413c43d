/* The signals of csrc/cuda: kernels of all ranks that know each other by words in the receiver's
 * memory (wait.cuh, NOTE [One ahead]) and by packets that carry their number (packets.cuh, NOTE
 * [Packets ahead]).
 *
 * A kernel tells its peers that it has begun, sends them STEPS packets, of which AHEAD go ahead of
 * those it waits for, and waits for their beginning. No rank waits for anything else at its end.
 */
#ifndef N
#define N 3
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#define KERNELS 3
#define STEPS 3
#ifdef FAULT_SHORT_RING
#define RING (2 * AHEAD + 1)
#else
#define RING (2 * AHEAD + 2)
#endif

#define ENTERED(owner, kernel, from) (((owner) * 2 + (kernel) % 2) * N + (from))
#define PACKET(owner, number, from) (((owner) * RING + (number) % RING) * N + (from))

byte entered[N * 2 * N];
byte packet[N * RING * N];

proctype rank(byte me) {
  byte kernel = 1, sent = 0, taken = 0, peer;
  do
  :: kernel > KERNELS -> break
  :: else ->
     peer = 0;
     do
     :: peer == N -> break
     :: peer != N ->
        if
        :: peer != me -> entered[ENTERED(peer, kernel, me)] = kernel
        :: else
        fi;
        peer++
     od;
     do
     :: taken == kernel * STEPS -> break
     :: sent < kernel * STEPS && sent <= taken + AHEAD ->
        sent++;
        peer = 0;
        do
        :: peer == N -> break
        :: peer != N ->
           if
           :: peer != me -> packet[PACKET(peer, sent, me)] = sent
           :: else
           fi;
           peer++
        od
     :: else ->
        taken++;
        peer = 0;
        do
        :: peer == N -> break
        :: peer != N ->
           if
#ifdef FAULT_BROADCAST_ENDS_ALONE
           :: me == 0  /* the root reads nothing, and does not wait for who does */
           :: me != 0 && peer != 0
           :: me != 0 && peer == 0 -> packet[PACKET(me, taken, peer)] == taken
#else
           :: peer != me -> packet[PACKET(me, taken, peer)] == taken  /* waits until it is */
           :: else
#endif
           fi;
           peer++
        od
     od;
     peer = 0;
     do
     :: peer == N -> break
     :: peer != N ->
        if
#ifndef FAULT_BROADCAST_ENDS_ALONE
        :: peer != me -> entered[ENTERED(me, kernel, peer)] == kernel
#endif
        :: else
        fi;
        peer++
     od;
     kernel++
  od
}

init {
  byte r = 0;
  atomic { do :: r == N -> break :: else -> run rank(r); r++ od }
}
