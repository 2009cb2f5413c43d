#include "tuner/choose_device.hpp"

#include <algorithm>

namespace dpt {
namespace {

constexpr int kWarp = 32;
constexpr size_t kLine = 8;     // bytes of data
constexpr size_t kVector = 16;  // bytes that a thread moves at a time

// Up to here one trip with twice the bytes beats two trips or flags behind the data, on NVLink.
constexpr size_t kLowLatencyWhole = 128 << 10;
constexpr size_t kLowLatencyPart = 32 << 10;

size_t ceil_div(size_t value, size_t by) { return (value + by - 1) / by; }

// Threads enough for `work` of them at a time, in as few channels as that takes.
cuda::Grid grid_for(size_t work) {
  const size_t threads =
      std::clamp(round_up(work, kWarp), size_t{kWarp}, size_t{cuda::kMostThreads});
  const size_t channels =
      std::clamp(ceil_div(work, threads), size_t{1}, size_t{cuda::kMaxChannels});
  return {static_cast<int>(channels), static_cast<int>(threads)};
}

}  // namespace

DevicePlan choose_device(const ChooseDeviceRequest& request) {
  if (!request.not_native.empty()) return {"delegate", {0, 0}, request.not_native};
  const bool whole = request.collective == DPT_ALL_REDUCE;
  const cuda::Grid in_lines = grid_for(ceil_div(request.bytes, kLine));
  const bool fits = request.bytes <= cuda::most_in_lines(request.layout, in_lines);
  if (request.even && fits && request.bytes <= (whole ? kLowLatencyWhole : kLowLatencyPart)) {
    return {"low_latency", in_lines, "small: data and flags in one trip"};
  }
  // Ranks must not go by sizes that only they know.
  if (!request.even) {
    return {"push", {cuda::kMaxChannels, cuda::kMostThreads}, "parts of different sizes"};
  }
  if (!request.large) {
    return {
        "delegate", {0, 0}, "GPU kernels reduce this type and operation in small messages only"};
  }
  // What one channel moves to one peer in a round is at least a few vectors of each thread.
  const size_t part = whole ? ceil_div(request.bytes, request.layout.size) : request.bytes;
  const cuda::Grid grid = grid_for(ceil_div(part, kVector));
  return whole ? DevicePlan{"two_shot", grid, "reduce_scatter and all_gather in one kernel"}
               : DevicePlan{"push", grid, "pushed into the peers' memory in chunks"};
}

}  // namespace dpt
