// Chunks that go straight to the receiver's output, past the slots of their queue.
//
// NOTE [Landing] The output of a queue's receiver may lie in memory that the sender has mapped
// (registered memory). The receiver then announces where the output lies when its kernel starts.
// The sender fills slots until it sees the announcement; it waits for none, since with ordinary
// memory none comes. From then on it writes chunks where they belong and needs no room in the queue
// for them. It says which chunk is the first before it publishes that one. Both ends go on counting
// chunks as if all lay in slots, so operations with and without landings follow each other on one
// queue.
//
// The sender overwrites only what the receiver has given up. The receiver's kernel runs, so the
// stream is done with the output's old content. Where the output is the input as well, a chunk's
// result is made of inputs that have been sent. An announcement holds for one kernel and carries
// the number of that kernel's first chunk. The next kernel on the queue forgets what is left of the
// announcement.
#pragma once

#include "cuda/device.cuh"

namespace dpt::cuda {

// In one word, so that it comes whole.
struct Landing {
  static constexpr int kStampBits = 28;
  static constexpr uint64_t kNone = 0;

  // `offset`: of the output in the receiver's registered memory, up to 1 TiB.
  DPT_DEVICE static uint64_t at(uint32_t first_chunk, uint64_t offset) {
    return (offset / kLandingUnit + 1) << kStampBits | stamp(first_chunk);
  }
  DPT_DEVICE static bool is_for(uint64_t landing, uint32_t first_chunk) {
    return landing != kNone && (landing & stamp(~0u)) == stamp(first_chunk);
  }
  DPT_DEVICE static uint64_t offset_of(uint64_t landing) {
    return ((landing >> kStampBits) - 1) * kLandingUnit;
  }

 private:
  DPT_DEVICE static uint64_t stamp(uint32_t chunk) { return chunk & ((1u << kStampBits) - 1); }
};

// Rounds from which on a queue's chunks lie in the output. What is no round yet is beyond all.
constexpr uint32_t kNeverLands = ~0u;
constexpr uint32_t kMayLand = ~0u - 1;

}  // namespace dpt::cuda
