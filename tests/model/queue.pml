/* A queue of slots of csrc/cuda/queue.cuh: the sender writes into the receiver's memory and says so,
 * the receiver reads and frees. The counts go on over all kernels.
 */
#define SLOTS 2
#define CHUNKS 6

byte slot[SLOTS];
byte arrived, taken;

proctype sender() {
  byte chunk = 0;
  do
  :: chunk == CHUNKS -> break
  :: else ->
#ifdef FAULT_ONE_TOO_MANY
     chunk - taken <= SLOTS;
#else
     chunk - taken < SLOTS;
#endif
#ifdef FAULT_SAID_TOO_EARLY
     arrived = chunk + 1;
     slot[chunk % SLOTS] = chunk + 1;
#else
     slot[chunk % SLOTS] = chunk + 1;
     arrived = chunk + 1;
#endif
     chunk++
  od
}

proctype receiver() {
  byte chunk = 0;
  do
  :: chunk == CHUNKS -> break
  :: else ->
     arrived > chunk;
#ifdef FAULT_FREED_TOO_EARLY
     taken = chunk + 1;
     assert(slot[chunk % SLOTS] == chunk + 1);
#else
     assert(slot[chunk % SLOTS] == chunk + 1);
     taken = chunk + 1;
#endif
     chunk++
  od
}

init { atomic { run sender(); run receiver() } }
