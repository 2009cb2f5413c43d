#include "tuner/choose.hpp"

#include <algorithm>

namespace dpt {
namespace {

// Below this every rank reduces everything itself: one barrier instead of three.
constexpr size_t kOneShotBytes = 16 << 10;
// Slots must stay in the L2 cache while all ranks touch them.
constexpr size_t kChunkBytes = 256 << 10;

}  // namespace

bool is_native_collective(Collective collective) {
  return collective != DPT_SEND && collective != DPT_RECV;
}

Plan choose(const ChooseRequest& request) {
  if (!request.not_native.empty()) return {"delegate", 0, request.not_native};
  if (request.size == 1) return {"local", 0, "a group of one rank"};
  if (request.collective == DPT_BARRIER) return {"barrier", 0, "one barrier"};
  const bool reduces_to_whole =
      request.collective == DPT_ALL_REDUCE || request.collective == DPT_REDUCE;
  if (reduces_to_whole && request.bytes <= kOneShotBytes) {
    return {"one_shot", 0, "small: one barrier"};
  }
  const size_t wanted = request.fixed_chunk_bytes != 0 ? request.fixed_chunk_bytes : kChunkBytes;
  const size_t chunk = std::min(wanted, request.max_chunk_bytes);
  const bool reduces = reduces_to_whole || request.collective == DPT_REDUCE_SCATTER;
  return {reduces ? "pipelined" : "exchange", chunk, "moves through cache-sized slots"};
}

}  // namespace dpt
