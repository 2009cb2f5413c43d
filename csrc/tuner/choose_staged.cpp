#include "tuner/choose_staged.hpp"

#include <algorithm>
#include <bit>

namespace dpt {
namespace {

// A message in so many chunks keeps both directions busy most of the time.
constexpr size_t kFewChunks = 4;
constexpr size_t kSmallestChunk = 64 << 10;
// The slots of all ranks together then stay in the cache of most processors.
constexpr size_t kUsualStagedChunk = 1 << 20;
// Below this there is little to divide, and the delegate's start takes as long.
constexpr size_t kLeastDivided = 4 << 20;
// Parts in percent that the delegate may get: from what it does where CPU-Reduce is clearly faster
// to where both are alike.
constexpr int kDelegatedParts[] = {25, 40, 50};

bool reduces(Collective collective) {
  return collective == DPT_ALL_REDUCE || collective == DPT_REDUCE_SCATTER;
}

// The number of bytes that a rank copies up.
size_t bytes_up(const ChooseDeviceRequest& request) {
  if (request.collective != DPT_REDUCE_SCATTER) return request.bytes;
  const int others = request.staging.ranks * request.staging.nodes - 1;
  return request.bytes * static_cast<size_t>(request.devices_add ? others : others + 1);
}

size_t usual_staged_chunk(const ChooseDeviceRequest& request) {
  const size_t chunk = std::bit_ceil(bytes_up(request) / kFewChunks + 1);
  return std::min(std::clamp(chunk, kSmallestChunk, kUsualStagedChunk), request.staging.slot_bytes);
}

// If devices add up, workers can't be what holds up. With half of them a chunk is reduced no faster
// than it is copied (measured with two H200).
int usual_threads(const ChooseDeviceRequest& request) {
  if (!reduces(request.collective)) return 1;
  return request.devices_add ? 0 : request.staging.threads;
}

// The delegate must be there to be given a part, and to be worth it the network must not be what
// both wait for.
bool can_divide(const ChooseDeviceRequest& request) {
  return request.divisible && request.delegate && request.staging.nodes == 1;
}

bool is_undivided(const Candidate& candidate) { return candidate.delegated == 0; }

bool is_served_by(const Candidate& candidate, const ChooseDeviceRequest& request) {
  return candidate.algorithm == AlgorithmName::kCpuReduce && candidate.chunk_bytes > 0 &&
         candidate.threads >= (request.devices_add ? 0 : 1) &&
         candidate.threads <= request.staging.threads;
}

}  // namespace

bool can_be_divided(Collective collective, DataType dtype, ReduceOp op) {
  const bool floats = dtype == DPT_FLOAT32 || dtype == DPT_BFLOAT16 || dtype == DPT_FLOAT16;
  return collective == DPT_ALL_REDUCE && floats && (op == DPT_SUM || op == DPT_AVG);
}

DevicePlan choose_staged(const ChooseDeviceRequest& request) {
  const int depth = request.staging.depth;
  if (request.tuned != nullptr && request.tuned->chosen) {
    const Candidate chosen =
        can_divide(request) ? *request.tuned->chosen : best_of(*request.tuned, is_undivided);
    if (is_delegate(chosen)) return {AlgorithmName::kDelegate, {0, 0}, 0, request.tuned->reason};
    if (is_served_by(chosen, request)) {
      // A later group may have smaller slots.
      const size_t chunk = std::min(chosen.chunk_bytes, request.staging.slot_bytes);
      return {AlgorithmName::kCpuReduce,
              {depth, chosen.threads},
              chunk,
              request.tuned->reason,
              chosen.delegated};
    }
  }
  if (request.delegate) {
    return {
        AlgorithmName::kDelegate, {0, 0}, 0, "CPU-Reduce is not known to be faster at this size"};
  }
  return {AlgorithmName::kCpuReduce,
          {depth, usual_threads(request)},
          usual_staged_chunk(request),
          request.staging.nodes > 1 ? "through the hosts' memory to the network and back"
                                    : "through the host's memory: the GPUs have no peer access"};
}

std::vector<Candidate> staged_candidates(const ChooseDeviceRequest& request) {
  const size_t usual = usual_staged_chunk(request);
  std::vector<Candidate> found;
  const auto add = [&](size_t chunk, int threads, int delegated = 0) {
    const Candidate candidate{
        AlgorithmName::kCpuReduce, chunk, request.staging.depth, threads, delegated};
    const bool known = std::any_of(found.begin(), found.end(), [&](const Candidate& each) {
      return each.chunk_bytes == chunk && each.threads == threads && each.delegated == delegated;
    });
    if (!known && is_served_by(candidate, request) && chunk <= request.staging.slot_bytes) {
      found.push_back(candidate);
    }
  };
  const int threads = usual_threads(request);
  add(usual, threads);
  if (request.devices_add) add(usual, request.staging.threads);
  if (request.devices_add && request.collective == DPT_ALL_REDUCE) {
    add(usual, request.staging.threads / 2);
  }
  if (threads > 1) add(usual, threads / 2);
  add(usual / 2, threads);
  add(usual * 2, threads);
  if (threads > 1) add(usual * 2, threads / 2);
  if (can_divide(request) && request.bytes >= kLeastDivided) {
    for (const int delegated : kDelegatedParts) add(usual, threads, delegated);
  }
  return found;
}

int tried_for(int bucket) {
  constexpr size_t kMostTried = 64 << 20;
  while (range_of(bucket).nominal > kMostTried) --bucket;
  return bucket;
}

int usual_workers(int cores) {
  constexpr int kMost = 12;
  constexpr int kKept = 4;  // for the program; of few cores half
  return std::clamp(cores - std::min(cores / 2, kKept), 1, kMost);
}

std::string describe_staged(const Candidate& candidate) {
  const std::string slots =
      std::to_string(candidate.channels) + " slots of " + describe_bytes(candidate.chunk_bytes);
  const std::string who = candidate.threads == 0
                              ? ", added up by the GPUs"
                              : ", " + std::to_string(candidate.threads) + " workers for each rank";
  if (candidate.delegated == 0) return slots + who;
  return slots + who + ", NCCL beside it with " + std::to_string(candidate.delegated) + "%";
}

}  // namespace dpt
