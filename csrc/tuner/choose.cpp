#include "tuner/choose.hpp"

#include <algorithm>
#include <bit>

#include "tuner/choose_device.hpp"
#include "tuner/choose_staged.hpp"

namespace dpt {
namespace {

constexpr size_t kKiB = 1 << 10;
constexpr size_t kMiB = 1 << 20;

constexpr size_t kLeastChunk = 16 * kKiB;
constexpr size_t kUsualChunk = 64 * kKiB;
constexpr size_t kLargeChunk = 1 * kMiB;

// The algorithm for messages that are cut into chunks.
AlgorithmName chunked_algorithm(Collective collective) {
  const bool reduces =
      collective == DPT_ALL_REDUCE || collective == DPT_REDUCE || collective == DPT_REDUCE_SCATTER;
  return reduces ? AlgorithmName::kPipelined : AlgorithmName::kExchange;
}

// Slots must stay in the L2 cache while all ranks touch them, but each step costs a barrier. A
// barrier takes long where ranks share cores and each of them has to be scheduled.
size_t usual_chunk(size_t bytes, bool oversubscribed) {
  if (bytes < kMiB) return kUsualChunk;
  return oversubscribed ? 256 * kKiB : 128 * kKiB;
}

// Between nodes long chunks keep the network busy while the node's ranks meet.
constexpr size_t kNodeChunk = 512 * kKiB;

Plan choose_between_nodes(const ChooseRequest& request) {
  if (request.collective == DPT_BARRIER) {
    return {AlgorithmName::kNodeBarrier, 0, "one meeting of the nodes"};
  }
  if (is_small_between_nodes(request)) {
    return {AlgorithmName::kNodeOneShot, 0, "small: one exchange between the nodes' leaders"};
  }
  if (request.fixed_chunk_bytes != 0) {
    const size_t chunk = std::min(request.fixed_chunk_bytes, request.max_chunk_bytes);
    return {AlgorithmName::kHierarchical, chunk, "DEEPYTORCH_CHUNK_BYTES"};
  }
  if (request.tuned != nullptr && request.tuned->chosen) {
    const Candidate& chosen = *request.tuned->chosen;
    return {chosen.algorithm, chosen.chunk_bytes, request.tuned->reason};
  }
  return {AlgorithmName::kHierarchical,
          std::min(kNodeChunk, request.max_chunk_bytes),
          "shared memory within nodes, TCP between them"};
}

}  // namespace

bool is_small_between_nodes(const ChooseRequest& request) {
  // All nodes' words together must fit into a small buffer, and a leader says them to all others.
  constexpr size_t kMost = 64 * kKiB;
  const size_t others = static_cast<size_t>(request.nodes - 1);
  switch (request.collective) {
    case DPT_ALL_REDUCE:
    case DPT_REDUCE:
    case DPT_BROADCAST:
      return request.bytes * others <= kMost;
    case DPT_ALL_GATHER:
      return !request.uneven && request.bytes * request.size <= kMost;
    case DPT_REDUCE_SCATTER:
      return request.bytes * request.size * others <= kMost;
    default:
      return false;
  }
}

bool is_native_collective(Collective collective) {
  return collective != DPT_SEND && collective != DPT_RECV;
}

Plan choose(const ChooseRequest& request) {
  if (!request.not_native.empty()) return {AlgorithmName::kDelegate, 0, request.not_native};
  if (request.size == 1) return {AlgorithmName::kLocal, 0, "a group of one rank"};
  if (request.nodes > 1) return choose_between_nodes(request);
  if (request.collective == DPT_BARRIER) return {AlgorithmName::kBarrier, 0, "one barrier"};
  const bool sums_everywhere =
      request.collective == DPT_ALL_REDUCE || request.collective == DPT_REDUCE;
  if (sums_everywhere &&
      request.bytes <= latency_bytes(request.collective, request.oversubscribed)) {
    return {AlgorithmName::kOneShot, 0, "small: one barrier"};
  }
  const AlgorithmName algorithm = chunked_algorithm(request.collective);
  if (request.fixed_chunk_bytes != 0) {
    const size_t chunk = std::min(request.fixed_chunk_bytes, request.max_chunk_bytes);
    return {algorithm, chunk, "DEEPYTORCH_CHUNK_BYTES"};
  }
  if (request.tuned != nullptr && request.tuned->chosen) {
    const Candidate& chosen = *request.tuned->chosen;
    return {chosen.algorithm, chosen.chunk_bytes, request.tuned->reason};
  }
  return {algorithm,
          std::min(usual_chunk(request.bytes, request.oversubscribed), request.max_chunk_bytes),
          "moves through cache-sized slots"};
}

std::vector<Candidate> candidates(const ChooseRequest& request) {
  const size_t most = request.max_chunk_bytes;
  if (request.nodes > 1) {
    // One trial takes long where the network is slow, so few are made.
    const size_t rule = std::min(kNodeChunk, most);
    std::vector<Candidate> found = {{AlgorithmName::kHierarchical, rule}};
    const size_t other = request.bytes < 2 * kMiB ? 128 * kKiB : kLargeChunk;
    if (other < rule || (other > rule && other <= most)) {
      found.push_back({AlgorithmName::kHierarchical, other});
    }
    return found;
  }
  const AlgorithmName algorithm = chunked_algorithm(request.collective);
  const size_t rule = std::min(usual_chunk(request.bytes, request.oversubscribed), most);
  std::vector<Candidate> found = {{algorithm, rule}};
  const size_t largest = std::min({request.bytes, kLargeChunk, most});
  size_t chunk = std::clamp(std::bit_floor(request.bytes / 16), kLeastChunk, kUsualChunk);
  for (; chunk <= largest; chunk *= 2) {
    if (chunk != rule) found.push_back({algorithm, chunk});
  }
  return found;
}

bool could_be_candidate(const Candidate& candidate, Collective collective, int nodes) {
  if (is_delegate(candidate)) return true;
  const AlgorithmName own =
      nodes > 1 ? AlgorithmName::kHierarchical : chunked_algorithm(collective);
  return candidate.algorithm == own && candidate.chunk_bytes >= kLeastChunk;
}

Decision decide(const Entry& entry, const Limits& limits, const std::string& found) {
  const Measurement* best = winner(entry, limits);
  if (best == nullptr) return {};
  Decision decision{best->candidate, "", "", entry};
  const Candidate& chosen = best->candidate;
  const bool in_stages = std::any_of(
      entry.begin(), entry.end(), [](auto& each) { return is_in_stages(each.candidate); });
  if (is_delegate(chosen) && in_stages) {
    decision.reason = "stages are not clearly faster, " + found;
  } else if (is_delegate(chosen)) {
    decision.reason =
        (limits.on_device ? "native is not clearly faster, " : "faster than native, ") + found;
  } else if (in_stages) {
    decision.reason = "fastest " + found + ", within nodes and between them";
  } else if (chosen.algorithm == AlgorithmName::kCpuReduce) {
    decision.reason = "fastest " + found + ", " + describe_staged(chosen);
  } else if (chosen.algorithm == AlgorithmName::kCopyEngine) {
    decision.reason =
        "fastest " + found + ", no multiprocessor, chunks of " + describe_bytes(chosen.chunk_bytes);
  } else if (limits.on_device) {
    decision.reason = "fastest " + found + ", " + std::to_string(chosen.channels) + " x " +
                      std::to_string(chosen.threads) + " threads";
  } else {
    decision.reason = "fastest " + found + ", chunks of " + describe_bytes(chosen.chunk_bytes);
  }
  return decision;
}

std::string describe_bytes(size_t bytes) {
  if (bytes >= kMiB && bytes % kMiB == 0) return std::to_string(bytes / kMiB) + " MiB";
  if (bytes >= kKiB && bytes % kKiB == 0) return std::to_string(bytes / kKiB) + " KiB";
  return std::to_string(bytes) + " bytes";
}

}  // namespace dpt
