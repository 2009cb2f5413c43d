#include "tuner/choose_device.hpp"

#include <algorithm>
#include <cstring>

namespace dpt {
namespace {

constexpr int kWarp = 32;
constexpr size_t kLine = 8;     // bytes of data
constexpr size_t kVector = 16;  // bytes that a thread moves at a time

// Up to here one trip with twice the bytes beats two trips or flags behind the data, on NVLink.
constexpr size_t kLowLatencyWhole = 128 << 10;
constexpr size_t kLowLatencyPart = 32 << 10;
// And up to here it beats NCCL.
constexpr size_t kBeatsDelegateWhole = 128 << 10;
constexpr size_t kBeatsDelegatePart = 256 << 10;

size_t ceil_div(size_t value, size_t by) { return (value + by - 1) / by; }

// Threads enough for `work` of them at a time, in as few channels as that takes.
cuda::Grid grid_for(size_t work) {
  const size_t threads =
      std::clamp(round_up(work, kWarp), size_t{kWarp}, size_t{cuda::kMostThreads});
  const size_t channels =
      std::clamp(ceil_div(work, threads), size_t{1}, size_t{cuda::kMaxChannels});
  return {static_cast<int>(channels), static_cast<int>(threads)};
}

bool is_whole(const ChooseDeviceRequest& request) { return request.collective == DPT_ALL_REDUCE; }

cuda::Grid grid_in_lines(const ChooseDeviceRequest& request) {
  return grid_for(ceil_div(request.bytes, kLine));
}

// What one channel moves to one peer in a round is at least a few vectors of each thread.
cuda::Grid grid_in_chunks(const ChooseDeviceRequest& request) {
  const size_t part =
      is_whole(request) ? ceil_div(request.bytes, request.layout.size) : request.bytes;
  return grid_for(ceil_div(part, kVector));
}

bool fits_in_lines(const ChooseDeviceRequest& request, const cuda::Grid& grid) {
  return request.even && request.bytes <= cuda::most_in_lines(request.layout, grid);
}

// One way to carry out collectives on the device, and what is worth trying of it.
struct Algorithm {
  const char* name;
  bool (*serves)(const ChooseDeviceRequest& request, const cuda::Grid& grid);
  cuda::Grid (*grid)(const ChooseDeviceRequest& request);  // the usual one
  size_t chunks[3];  // the first of them, and each other that is not 0
};
// One line for each.
constexpr Algorithm kAlgorithms[] = {
    {"low_latency", fits_in_lines, grid_in_lines, {}},
    {"two_shot",
     [](const ChooseDeviceRequest& request, const cuda::Grid&) {
       return is_whole(request) && request.large;
     },
     grid_in_chunks,
     {}},
    {"push",
     [](const ChooseDeviceRequest& request, const cuda::Grid&) {
       return !is_whole(request) && request.large;
     },
     grid_in_chunks,
     {}},
};
// Tried beside the usual grid where that has more: each channel is a multiprocessor that computing
// has to do without.
constexpr int kFewerChannels[] = {16, 8};

const Algorithm* find(const char* name) {
  for (const Algorithm& algorithm : kAlgorithms) {
    if (std::strcmp(algorithm.name, name) == 0) return &algorithm;
  }
  return nullptr;
}

DevicePlan delegated(std::string reason) { return {"delegate", {0, 0}, 0, std::move(reason)}; }

DevicePlan rule_of_thumb(const ChooseDeviceRequest& request) {
  const bool whole = is_whole(request);
  const size_t most = request.delegate ? (whole ? kBeatsDelegateWhole : kBeatsDelegatePart)
                                       : (whole ? kLowLatencyWhole : kLowLatencyPart);
  const cuda::Grid in_lines = grid_in_lines(request);
  if (request.bytes <= most && fits_in_lines(request, in_lines)) {
    return {"low_latency", in_lines, 0, "small: data and flags in one trip"};
  }
  // Ranks must not go by sizes that only they know.
  if (!request.even) {
    if (request.delegate) return delegated("parts of different sizes are not measured");
    return {"push", {cuda::kMaxChannels, cuda::kMostThreads}, 0, "parts of different sizes"};
  }
  if (!request.large) {
    return delegated("GPU kernels reduce this type and operation in small messages only");
  }
  if (request.delegate) return delegated("GPU kernels are not known to be faster at this size");
  const cuda::Grid grid = grid_in_chunks(request);
  return whole ? DevicePlan{"two_shot", grid, 0, "reduce_scatter and all_gather in one kernel"}
               : DevicePlan{"push", grid, 0, "pushed into the peers' memory in chunks"};
}

// Whether what was measured at one size and type serves this one.
bool serves(const Candidate& candidate, const ChooseDeviceRequest& request) {
  const Algorithm* algorithm = find(candidate.algorithm);
  const auto within = [](int number, int most) { return 0 < number && number <= most; };
  return algorithm != nullptr && within(candidate.channels, cuda::kMaxChannels) &&
         within(candidate.threads, cuda::kMostThreads) &&
         algorithm->serves(request, {candidate.channels, candidate.threads});
}

}  // namespace

DevicePlan choose_device(const ChooseDeviceRequest& request) {
  if (!request.not_native.empty()) return delegated(request.not_native);
  if (request.even && request.tuned != nullptr && request.tuned->chosen.algorithm != nullptr) {
    const Candidate& chosen = request.tuned->chosen;
    if (is_delegate(chosen)) return delegated(request.tuned->reason);
    if (serves(chosen, request)) return to_device_plan(chosen, request.tuned->reason);
  }
  return rule_of_thumb(request);
}

std::vector<Candidate> device_candidates(const ChooseDeviceRequest& request) {
  ChooseDeviceRequest native = request;
  native.delegate = false;
  native.tuned = nullptr;
  const DevicePlan rule = rule_of_thumb(native);
  std::vector<Candidate> found = {{known_device_algorithm(rule.algorithm),
                                   rule.chunk_bytes,
                                   rule.grid.channels,
                                   rule.grid.threads}};
  const auto add = [&](const Algorithm& algorithm, const cuda::Grid& grid, size_t chunk) {
    const bool is_rule = algorithm.name == found[0].algorithm && chunk == found[0].chunk_bytes &&
                         grid.channels == found[0].channels && grid.threads == found[0].threads;
    if (is_rule || !algorithm.serves(request, grid)) return;
    if (found.size() == kMostDeviceCandidates) return;
    found.push_back({algorithm.name, chunk, grid.channels, grid.threads});
  };
  for (const Algorithm& algorithm : kAlgorithms) {
    const cuda::Grid usual = algorithm.grid(request);
    add(algorithm, usual, algorithm.chunks[0]);
    for (const size_t chunk : algorithm.chunks) {
      if (chunk != 0 && chunk != algorithm.chunks[0]) add(algorithm, usual, chunk);
    }
    for (const int channels : kFewerChannels) {
      if (channels < usual.channels) {
        add(algorithm, {channels, usual.threads}, algorithm.chunks[0]);
      }
    }
  }
  return found;
}

DevicePlan to_device_plan(const Candidate& candidate, std::string reason) {
  return {candidate.algorithm,
          {candidate.channels, candidate.threads},
          candidate.chunk_bytes,
          std::move(reason)};
}

const char* known_device_algorithm(const char* name) {
  const Algorithm* algorithm = find(name);
  return algorithm != nullptr ? algorithm->name : nullptr;
}

}  // namespace dpt
