#include "tuner/choose_device.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "tuner/choose_staged.hpp"

namespace dpt {

std::string why_not_wired(cuda::Wiring wiring, Collective collective, bool large) {
  if (wiring != cuda::Wiring::kPartial || (collective == DPT_ALL_REDUCE && large)) return "";
  return "GPU kernels only sum float32, bfloat16 and float16 in an all_reduce where not all GPUs "
         "reach each other's memory";
}

namespace {

constexpr int kWarp = 32;
constexpr size_t kLine = 8;  // bytes of data
// More threads than this go to one channel when all channels have that many.
constexpr size_t kFewThreads = 128;
constexpr size_t kUsualChannels = 32;  // of messages that these have threads enough for
constexpr size_t kUsualDeviceChunk = 16 << 10;
// From here on a sum takes so long that programs compute beside it, and what it takes of the GPU
// counts: NCCL's kernel has 24 blocks. On two H200 all_reduces of 16 MiB on 64 multiprocessors took
// 0.74 of NCCL's time. DDP's step of BERT, which computes beside its buckets, took 1.02 of it.
constexpr size_t kLeastBesideCompute = 8 << 20;

// Copy engines take longer to start than kernels; below this they are not tried.
constexpr size_t kLeastCopied = 2 << 20;

// Up to here lines, with twice the bytes in the shortest trip, beat packets, on NVLink.
constexpr size_t kLinesWhole = 96 << 10;
constexpr size_t kLinesPart = 96 << 10;
// And up to here one or the other beats NCCL.
constexpr size_t kBeatsDelegateWhole = 512 << 10;
constexpr size_t kBeatsDelegatePart = 256 << 10;

size_t ceil_div(size_t value, size_t by) { return (value + by - 1) / by; }

bool is_whole(const ChooseDeviceRequest& request) { return request.collective == DPT_ALL_REDUCE; }
// The number of bytes that one rank sends another at a time.
size_t part_of(const ChooseDeviceRequest& request) {
  return is_whole(request) ? ceil_div(request.bytes, request.layout.size) : request.bytes;
}
// Every rank has a part of the same size for every other.
bool sends_to_all(const ChooseDeviceRequest& request) {
  return is_whole(request) || request.collective == DPT_REDUCE_SCATTER ||
         request.collective == DPT_ALL_GATHER || request.collective == DPT_ALL_TO_ALL;
}

// Tells whether all that a rank sends is for all others.
bool goes_to_all(const ChooseDeviceRequest& request) {
  return request.collective == DPT_ALL_GATHER || request.collective == DPT_BROADCAST;
}

// A thread for each of `work`, of which one channel's memory holds `room`, on as many channels as
// that fills with some. All channels only where the usual number can't have enough threads: on four
// H200 more of them were no faster below that.
cuda::Grid grid_for(size_t work, size_t room, const cuda::Layout& layout) {
  const auto most = static_cast<size_t>(layout.channels);
  const size_t usual = std::min(kUsualChannels, most);
  size_t channels = std::clamp(ceil_div(work, kFewThreads), size_t{1}, usual);
  if (work > usual * cuda::kMostThreads) channels = most;
  channels = std::max(channels, std::min(ceil_div(work, std::max(room, size_t{1})), most));
  const size_t threads = std::clamp(
      round_up(ceil_div(work, channels), kWarp), size_t{kWarp}, size_t{cuda::kMostThreads});
  return {static_cast<int>(channels), static_cast<int>(threads)};
}
cuda::Grid grid_in_lines(const ChooseDeviceRequest& request) {
  return grid_for(
      ceil_div(request.bytes, kLine), request.layout.line_bytes / kLine, request.layout);
}
cuda::Grid grid_in_packets(const ChooseDeviceRequest& request) {
  const size_t packets = ceil_div(part_of(request), cuda::kPacketData);
  const size_t room = request.layout.packet_bytes / cuda::kPacketBytes;
  return grid_for(packets * cuda::kLanes, room * cuda::kLanes, request.layout);
}
cuda::Grid full_grid(const ChooseDeviceRequest& request) {
  return {request.layout.channels, cuda::kMostThreads};
}

// The grid of a sum that competes with the delegate's.
cuda::Grid beside_compute(const ChooseDeviceRequest& request, cuda::Grid grid) {
  const bool narrow = request.delegate && is_whole(request) && request.bytes >= kLeastBesideCompute;
  if (narrow) grid.channels = std::min(grid.channels, static_cast<int>(kUsualChannels));
  return grid;
}

size_t usual_device_chunk(const ChooseDeviceRequest& request) {
  return std::min(kUsualDeviceChunk, size_t{request.layout.slot_bytes});
}

bool fits_in_lines(const ChooseDeviceRequest& request, const cuda::Grid& grid) {
  return request.even && request.bytes <= cuda::most_in_lines(request.layout, grid);
}
bool fits_in_packets(const ChooseDeviceRequest& request, const cuda::Grid& grid) {
  constexpr size_t kVector = 16;  // parts of an all_reduce end at whole ones
  return request.even && request.large && sends_to_all(request) &&
         part_of(request) + kVector <= cuda::most_in_packets(request.layout, grid);
}

// One way to carry out collectives on the device, and what is worth trying of it.
struct Algorithm {
  AlgorithmName name;
  bool (*serves)(const ChooseDeviceRequest& request, const cuda::Grid& grid);
  cuda::Grid (*grid)(const ChooseDeviceRequest& request);  // the usual one
  size_t chunks[3];  // the first of them, and each other that is not 0
};
// One line for each.
constexpr Algorithm kAlgorithms[] = {
    {AlgorithmName::kLowLatency, fits_in_lines, grid_in_lines, {}},
    {AlgorithmName::kPacket, fits_in_packets, grid_in_packets, {}},
    {AlgorithmName::kTwoShot,
     [](const ChooseDeviceRequest& request, const cuda::Grid& grid) {
       return is_whole(request) && request.large && grid.threads == cuda::kMostThreads;
     },
     full_grid,
     {kUsualDeviceChunk, kUsualDeviceChunk / 2, kUsualDeviceChunk * 2}},
    {AlgorithmName::kTree,
     [](const ChooseDeviceRequest& request, const cuda::Grid& grid) {
       return is_whole(request) && request.large && request.wiring != cuda::Wiring::kAlike &&
              grid.threads == cuda::kMostThreads;
     },
     full_grid,
     {kUsualDeviceChunk, kUsualDeviceChunk * 2}},
    {AlgorithmName::kPush,
     [](const ChooseDeviceRequest& request, const cuda::Grid& grid) {
       return !is_whole(request) && request.large && grid.threads == cuda::kMostThreads;
     },
     full_grid,
     {kUsualDeviceChunk, kUsualDeviceChunk / 2, kUsualDeviceChunk * 2}},
    {AlgorithmName::kCopyEngine,
     [](const ChooseDeviceRequest& request, const cuda::Grid&) {
       return goes_to_all(request) && request.even && request.copies.slot_bytes != 0 &&
              request.bytes >= kLeastCopied;
     },
     [](const ChooseDeviceRequest&) { return cuda::Grid{0, 0}; },  // no kernel
     {4 << 20, 1 << 20}},
    {AlgorithmName::kRing,
     [](const ChooseDeviceRequest& request, const cuda::Grid& grid) {
       return goes_to_all(request) && request.even && request.layout.size > 2 &&
              grid.threads == cuda::kMostThreads;
     },
     full_grid,
     {kUsualDeviceChunk, kUsualDeviceChunk * 2}},
};
// Tried beside the usual grid where that has more: each channel is a multiprocessor that computing
// has to do without.
constexpr int kFewerChannels[] = {static_cast<int>(kUsualChannels), 16};
// The most chunks of one call that copy engines carry out. Each is some operations on every stream.
// A stream that holds about a thousand makes the calling thread wait until it has done some.
constexpr size_t kMostCopies = 64;

// How far behind is too far to be tried at the next larger range. Through the host's memory times
// spread more, and how many workers pay also depends on the size.
constexpr double kFarBehind = 1.1;
constexpr double kFarBehindStaged = 2;

bool is_same(const Candidate& a, const Candidate& b) {
  return a.algorithm == b.algorithm && a.chunk_bytes == b.chunk_bytes && a.channels == b.channels &&
         a.threads == b.threads && a.delegated == b.delegated;
}

// All others touch every rank's memory.
bool can_serve(const Algorithm& algorithm,
               const ChooseDeviceRequest& request,
               const cuda::Grid& grid) {
  const bool reaches =
      request.wiring != cuda::Wiring::kPartial || algorithm.name == AlgorithmName::kTree;
  return reaches && algorithm.serves(request, grid);
}

const Algorithm* find(AlgorithmName name) {
  for (const Algorithm& algorithm : kAlgorithms) {
    if (algorithm.name == name) return &algorithm;
  }
  return nullptr;
}

DevicePlan delegated(std::string reason) {
  return {AlgorithmName::kDelegate, {0, 0}, 0, std::move(reason)};
}

DevicePlan delegated_in_stages(const ChooseDeviceRequest& request, std::string reason) {
  if (request.nodes == 1 || !request.even ||
      !goes_by_nodes(request.collective, request.bytes, request.ranks)) {
    return delegated(std::move(reason));
  }
  if (!request.delegate) {
    const bool exchanges = request.collective == DPT_ALL_TO_ALL;
    return {AlgorithmName::kInStages,
            {0, 0},
            0,
            exchanges ? "fewer messages between nodes than in one piece"
                      : "fewer bytes between nodes than in one ring"};
  }
  // Against a delegate that competes its stages have to be measured.
  const bool known = request.tuned != nullptr && request.tuned->chosen;
  if (known && is_in_stages(*request.tuned->chosen)) {
    return {AlgorithmName::kInStages, {0, 0}, 0, request.tuned->reason};
  }
  const bool lost = known && is_delegate(*request.tuned->chosen);
  return delegated(lost ? request.tuned->reason : std::move(reason));
}

DevicePlan rule_of_thumb(const ChooseDeviceRequest& request) {
  const bool whole = is_whole(request);
  const bool wins = request.bytes <= (whole ? kBeatsDelegateWhole : kBeatsDelegatePart);
  const bool native = wins || !request.delegate;
  if (request.wiring == cuda::Wiring::kPartial) {
    std::string reason = why_not_wired(request.wiring, request.collective, request.large);
    if (!reason.empty()) return delegated(std::move(reason));
    if (request.delegate) return delegated("GPU kernels are not known to be faster at this size");
    return {AlgorithmName::kTree,
            full_grid(request),
            usual_device_chunk(request),
            "along trees, since not all GPUs reach each other's memory"};
  }
  const cuda::Grid in_lines = grid_in_lines(request);
  if (native && request.bytes <= (whole ? kLinesWhole : kLinesPart) &&
      fits_in_lines(request, in_lines)) {
    return {AlgorithmName::kLowLatency, in_lines, 0, "small: data and flags in one trip"};
  }
  // Ranks must not go by sizes that only they know.
  if (!request.even) {
    if (request.delegate) return delegated("parts of different sizes are not measured");
    return {AlgorithmName::kPush,
            full_grid(request),
            usual_device_chunk(request),
            "parts of different sizes"};
  }
  if (!request.large) {
    return delegated("GPU kernels reduce this type and operation in small messages only");
  }
  if (!native) return delegated("GPU kernels are not known to be faster at this size");
  const cuda::Grid in_packets = grid_in_packets(request);
  if (fits_in_packets(request, in_packets)) {
    return {AlgorithmName::kPacket, in_packets, 0, "data with its own arrival, in packets"};
  }
  if (request.delegate) return delegated("GPU kernels are not known to be faster at this size");
  return whole ? DevicePlan{AlgorithmName::kTwoShot,
                            full_grid(request),
                            usual_device_chunk(request),
                            "reduce_scatter and all_gather in one kernel"}
               : DevicePlan{AlgorithmName::kPush,
                            full_grid(request),
                            usual_device_chunk(request),
                            "pushed into the peers' memory in chunks"};
}

// Whether what was measured at one size and type serves this one.
bool serves(const Candidate& candidate, const ChooseDeviceRequest& request) {
  const Algorithm* algorithm = find(candidate.algorithm);
  const auto within = [](int number, int most) { return 0 < number && number <= most; };
  const bool is_kernel = candidate.algorithm != AlgorithmName::kCopyEngine;
  const bool has_room = within(candidate.channels, request.layout.channels) &&
                        within(candidate.threads, cuda::kMostThreads);
  return algorithm != nullptr && has_room == is_kernel &&
         can_serve(*algorithm, request, {candidate.channels, candidate.threads});
}

bool can_be_replayed(const Candidate& candidate) {
  return candidate.algorithm != AlgorithmName::kCopyEngine;
}

}  // namespace

int offer_channels(int num_sms, int used, int wanted) {
  // The rest is for kernels that compute, which end by themselves, and for the delegate's.
  const int budget = num_sms * 3 / 4;
  constexpr int kLeast = 2;
  const int left = std::max(budget - used, kLeast);
  if (wanted != 0) return std::min({wanted, left, cuda::kMaxChannels});
  // The first group, often the only one, gets half of the device; others get half of the rest.
  const auto half = static_cast<unsigned>((used == 0 ? num_sms : left) / 2);
  return std::clamp(static_cast<int>(std::bit_floor(half)), kLeast, cuda::kMaxChannels);
}

bool goes_by_nodes(Collective collective, size_t bytes, int ranks) {
  const bool parts = collective == DPT_ALL_GATHER || collective == DPT_REDUCE_SCATTER ||
                     collective == DPT_ALL_TO_ALL;
  const size_t whole = bytes * static_cast<size_t>(parts ? ranks : 1);
  return (parts || collective == DPT_ALL_REDUCE) && whole >= kStagedBytes;
}

bool is_in_stages(const Candidate& candidate) {
  return candidate.algorithm == AlgorithmName::kInStages;
}

DevicePlan choose_device(const ChooseDeviceRequest& request) {
  if (!request.not_native.empty()) return delegated_in_stages(request, request.not_native);
  if (request.staging.slot_bytes != 0) {
    DevicePlan plan = choose_staged(request);
    const bool is_native = plan.algorithm == AlgorithmName::kCpuReduce;
    return is_native ? plan : delegated_in_stages(request, std::move(plan.reason));
  }
  if (request.even && request.tuned != nullptr && request.tuned->chosen) {
    if (is_delegate(*request.tuned->chosen)) return delegated(request.tuned->reason);
    // A size may be too large for what is fastest in the middle of its range, or of the range
    // before.
    const Candidate chosen = best_of(*request.tuned, [&](const Candidate& each) {
      const bool can = serves(each, request) && (!request.replayed || can_be_replayed(each));
      return can || is_delegate(each);
    });
    if (!is_delegate(chosen)) return to_device_plan(chosen, request.tuned->reason);
  }
  return rule_of_thumb(request);
}

std::vector<Candidate> device_candidates(const ChooseDeviceRequest& request) {
  if (request.staging.slot_bytes != 0) return staged_candidates(request);
  ChooseDeviceRequest native = request;
  native.delegate = false;
  native.tuned = nullptr;
  const DevicePlan rule = rule_of_thumb(native);
  const cuda::Grid first = beside_compute(request, rule.grid);
  std::vector<Candidate> found = {
      {rule.algorithm, rule.chunk_bytes, first.channels, first.threads}};
  const auto add = [&](const Algorithm& algorithm, const cuda::Grid& grid, size_t chunk) {
    const bool is_rule = algorithm.name == found[0].algorithm && chunk == found[0].chunk_bytes &&
                         grid.channels == found[0].channels && grid.threads == found[0].threads;
    if (is_rule || !can_serve(algorithm, request, grid)) return;
    if (found.size() == kMostDeviceCandidates) return;
    found.push_back({algorithm.name, chunk, grid.channels, grid.threads});
  };
  for (const Algorithm& algorithm : kAlgorithms) {
    const cuda::Grid usual = beside_compute(request, algorithm.grid(request));
    add(algorithm, usual, algorithm.chunks[0]);
    for (const size_t chunk : algorithm.chunks) {
      if (chunk == 0 || chunk == algorithm.chunks[0]) continue;
      const bool copies = algorithm.name == AlgorithmName::kCopyEngine;
      if (!copies || request.bytes <= kMostCopies * chunk) add(algorithm, usual, chunk);
    }
    for (const int channels : kFewerChannels) {
      if (channels < usual.channels) {
        add(algorithm, {channels, usual.threads}, algorithm.chunks[0]);
      }
    }
  }
  return found;
}

std::vector<Candidate> without_slow_variants(const std::vector<Candidate>& candidates,
                                             const Entry& smaller) {
  const auto time_of = [&](const Candidate& candidate) {
    const auto found = std::find_if(smaller.begin(), smaller.end(), [&](const Measurement& each) {
      return is_same(each.candidate, candidate);
    });
    return found != smaller.end() ? found->median_us : std::numeric_limits<double>::infinity();
  };
  std::vector<Candidate> found;
  for (const Candidate& candidate : candidates) {
    double best_us = std::numeric_limits<double>::infinity();
    for (const Candidate& each : candidates) {
      if (each.algorithm == candidate.algorithm) {
        best_us = std::min(best_us, time_of(each));
      }
    }
    const bool staged = candidate.algorithm == AlgorithmName::kCpuReduce;
    const double time_us = time_of(candidate);
    const bool slow =
        std::isfinite(time_us) && time_us > (staged ? kFarBehindStaged : kFarBehind) * best_us;
    if (!slow) found.push_back(candidate);
  }
  return found;
}

Candidate best_of(const Decision& decision,
                  const std::function<bool(const Candidate& candidate)>& serves) {
  if (decision.chosen && serves(*decision.chosen)) return *decision.chosen;
  Entry left;
  for (const Measurement& each : decision.times) {
    if (serves(each.candidate)) left.push_back(each);
  }
  const Measurement* const best =
      winner(left, {.max_chunk_bytes = ~size_t{0}, .delegate = true, .on_device = true});
  return best != nullptr ? best->candidate : Candidate{AlgorithmName::kDelegate};
}

DevicePlan to_device_plan(const Candidate& candidate, std::string reason) {
  return {candidate.algorithm,
          {candidate.channels, candidate.threads},
          candidate.chunk_bytes,
          std::move(reason),
          candidate.delegated};
}

}  // namespace dpt
