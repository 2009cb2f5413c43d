#include "tuner/choose_device.hpp"

#include <algorithm>

namespace dpt {
namespace {

constexpr int kWarp = 32;
constexpr size_t kLine = 8;     // bytes of data
constexpr size_t kVector = 16;  // bytes that a thread moves at a time

// Up to here lines, with twice the bytes in the shortest trip, beat packets, on NVLink.
constexpr size_t kLinesWhole = 96 << 10;
constexpr size_t kLinesPart = 64 << 10;
// Rounds that fill a pipeline of queues, in chunks that are worth their signals.
constexpr size_t kRounds = 8;
constexpr size_t kSmallestChunk = 8 << 10;

size_t ceil_div(size_t value, size_t by) { return (value + by - 1) / by; }

// Threads enough for `work` of them at a time, in as few channels as that takes.
cuda::Grid grid_for(size_t work) {
  const size_t threads =
      std::clamp(round_up(work, kWarp), size_t{kWarp}, size_t{cuda::kMostThreads});
  const size_t channels =
      std::clamp(ceil_div(work, threads), size_t{1}, size_t{cuda::kMaxChannels});
  return {static_cast<int>(channels), static_cast<int>(threads)};
}

// Every rank has a part of the same size for every other.
bool sends_to_all(Collective collective) {
  return collective == DPT_ALL_REDUCE || collective == DPT_REDUCE_SCATTER ||
         collective == DPT_ALL_GATHER || collective == DPT_ALL_TO_ALL;
}

}  // namespace

DevicePlan choose_device(const ChooseDeviceRequest& request) {
  if (!request.not_native.empty()) return {"delegate", {0, 0}, 0, request.not_native};
  const bool whole = request.collective == DPT_ALL_REDUCE;
  const cuda::Grid in_lines = grid_for(ceil_div(request.bytes, kLine));
  const bool fits = request.bytes <= cuda::most_in_lines(request.layout, in_lines);
  if (request.even && fits && request.bytes <= (whole ? kLinesWhole : kLinesPart)) {
    return {"low_latency", in_lines, 0, "small: data and flags in one trip"};
  }
  constexpr cuda::Grid kFull{cuda::kMaxChannels, cuda::kMostThreads};
  // Ranks must not go by sizes that only they know.
  if (!request.even) return {"push", kFull, 0, "parts of different sizes"};
  if (!request.large) {
    return {
        "delegate", {0, 0}, 0, "GPU kernels reduce this type and operation in small messages only"};
  }
  const size_t part = whole ? ceil_div(request.bytes, request.layout.size) : request.bytes;
  if (sends_to_all(request.collective) &&
      part + kVector <= cuda::most_in_packets(request.layout, kFull)) {
    return {"packet", kFull, 0, "data with its own arrival, in packets"};
  }
  const size_t chunk = std::clamp(round_up(ceil_div(part, kRounds * kFull.channels), kVector),
                                  std::min(kSmallestChunk, size_t{request.layout.slot_bytes}),
                                  size_t{request.layout.slot_bytes});
  return whole ? DevicePlan{"two_shot", kFull, chunk, "reduce_scatter and all_gather in one kernel"}
               : DevicePlan{"push", kFull, chunk, "pushed into the peers' memory in chunks"};
}

}  // namespace dpt
