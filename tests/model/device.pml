/* The signals of csrc/cuda: kernels of all ranks that know each other by words in the receiver's
 * memory (wait.cuh, NOTE [One ahead]) and by packets that carry their number (packets.cuh).
 *
 * A kernel tells its peers that it has begun, sends them a packet into the copy of its parity, and
 * waits for their packets and beginnings. No rank waits for anything else at its end.
 */
#ifndef N
#define N 3
#endif
#define KERNELS 4

#define AT(owner, parity, from) (((owner) * 2 + (parity)) * N + (from))

byte entered[N * 2 * N];
byte packet[N * 2 * N];

proctype rank(byte me) {
  byte kernel = 1, peer, parity;
  do
  :: kernel > KERNELS -> break
  :: else ->
#ifdef FAULT_ONE_COPY
     parity = 0;
#else
     parity = kernel % 2;
#endif
     peer = 0;
     do
     :: peer == N -> break
     :: peer != N && peer != me ->
        entered[AT(peer, parity, me)] = kernel;
        packet[AT(peer, parity, me)] = kernel;
        peer++
     :: peer != N && peer == me -> peer++
     od;
     peer = 0;
     do
     :: peer == N -> break
     :: peer != N && peer != me ->
#ifndef FAULT_BROADCAST_ENDS_ALONE
        packet[AT(me, parity, peer)] == kernel;  /* waits until it is this kernel's */
        entered[AT(me, parity, peer)] == kernel;
#else
        if
        :: me == 0  /* the root reads nothing, and does not wait for who does */
        :: me != 0 -> packet[AT(me, parity, peer)] == kernel
        fi;
#endif
        peer++
     :: peer != N && peer == me -> peer++
     od;
     kernel++
  od
}

init {
  byte r = 0;
  atomic { do :: r == N -> break :: else -> run rank(r); r++ od }
}
