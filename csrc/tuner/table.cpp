#include "tuner/table.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace dpt {
namespace {

constexpr size_t kFirstNominal = 64 << 10;
// Most memory for trying out. The first is of one rank that has a core of its own. The second is of
// all the ranks of a node that share cores: they take turns and so need the sum of their times.
constexpr size_t kScratchBytes = 32 << 20;
constexpr size_t kSharedScratchBytes = 96 << 20;
// Between nodes one trial of long messages takes long, and middling ones tell as much.
constexpr size_t kNodesScratchBytes = 8 << 20;
constexpr size_t kMostBetweenGpus = 16 << 20;  // the same of one buffer on the device

constexpr double kEqual = 1.03;
constexpr double kBeyondNoise = 1.1;
constexpr double kClearlyFaster = 1.03;  // on the device, where times are steadier

size_t nominal_of(int bucket) { return kFirstNominal << 2 * bucket; }

}  // namespace

SizeRange range_of(int bucket) {
  const bool last = bucket == kNumBuckets - 1;
  return {bucket == 0 ? kLatencyBytes + 1 : nominal_of(bucket) / 2,
          nominal_of(bucket),
          last ? std::numeric_limits<size_t>::max() : nominal_of(bucket) * 2 - 1};
}

int last_bucket(const TuningClass& group) { return kNumBuckets - (group.on_device() ? 1 : 2); }

size_t latency_bytes(Collective collective, bool oversubscribed) {
  const bool sums_whole = collective == DPT_ALL_REDUCE || collective == DPT_REDUCE;
  return sums_whole && oversubscribed ? 64 << 10 : kLatencyBytes;
}

std::optional<int> bucket_of(Collective collective, size_t bytes, const TuningClass& group) {
  // Ranks of an all_to_all may each see another size, and none knows the others'. On the device
  // even ones are known as such.
  const bool same_size =
      collective < kNumCollectives && (collective != DPT_ALL_TO_ALL || group.on_device());
  if (!same_size || collective == DPT_BARRIER) return std::nullopt;
  if (bytes <= latency_bytes(collective, group.oversubscribed)) return std::nullopt;
  // 64 KiB << 2b is the middle of bucket b, half and twice of it are its ends.
  constexpr int kSecond = std::bit_width(2 * kFirstNominal);
  const int above = static_cast<int>(std::bit_width(bytes)) - kSecond;
  int bucket = above < 0 ? 0 : std::min(above / 2 + 1, last_bucket(group));
  if (group.on_device()) {
    while (group.nodes > 1 && nominal_of(bucket) > kMostBetweenGpus) --bucket;
    return bucket;
  }
  size_t most = group.oversubscribed ? kSharedScratchBytes / group.ranks : kScratchBytes;
  if (group.nodes > 1) most = std::min(most, kNodesScratchBytes);
  const size_t buffers = num_buffers(collective, group.ranks);
  while (bucket > 0 && nominal_of(bucket) * buffers > most) --bucket;
  return bucket;
}

SizeRange served_by(Collective collective, int bucket, const TuningClass& group) {
  SizeRange range = range_of(bucket);
  range.first = std::max(range.first, latency_bytes(collective, group.oversubscribed) + 1);
  const size_t largest = range_of(kNumBuckets - 1).last;
  if (bucket_of(collective, largest, group) == bucket) range.last = largest;
  return range;
}

int num_buffers(Collective collective, int ranks) {
  switch (collective) {
    case DPT_ALL_GATHER:
    case DPT_REDUCE_SCATTER:
    case DPT_GATHER:
    case DPT_SCATTER:
      return ranks + 1;
    case DPT_ALL_TO_ALL:
      return 2 * ranks;
    default:
      return 1;
  }
}

std::optional<AlgorithmName> known_algorithm(std::string_view name, bool on_device) {
  const auto algorithm = algorithm_named(name, on_device);
  if (!algorithm) return std::nullopt;
  switch (*algorithm) {
    // Nothing competes with these.
    case AlgorithmName::kLocal:
    case AlgorithmName::kBarrier:
    case AlgorithmName::kMailbox:
    case AlgorithmName::kNodeBarrier:
    case AlgorithmName::kNodeOneShot:
      return std::nullopt;
    default:
      return algorithm;
  }
}

bool is_delegate(const Candidate& candidate) {
  return candidate.algorithm == AlgorithmName::kDelegate;
}

Measurement summarize(const Candidate& candidate, std::vector<double> times_us) {
  std::sort(times_us.begin(), times_us.end());
  const auto quantile = [&](double part) {
    const double place = part * static_cast<double>(times_us.size() - 1);
    const auto below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, times_us.size() - 1);
    const double weight = place - static_cast<double>(below);
    const double time_us = times_us[below] * (1 - weight) + times_us[above] * weight;
    // As the profile keeps it, so that the next run decides as this one did.
    return std::round(time_us * 100) / 100;
  };
  return {candidate, quantile(0.5), quantile(0.25), quantile(0.75)};
}

const Measurement* winner(const Entry& entry, const Limits& limits) {
  const Measurement* fastest = nullptr;
  const Measurement* delegate = nullptr;
  const auto usable = [&](const Measurement& measurement) {
    return !is_delegate(measurement.candidate) &&
           (limits.delegate || measurement.candidate.delegated == 0) &&
           measurement.candidate.chunk_bytes <= limits.max_chunk_bytes;
  };
  for (const Measurement& each : entry) {
    if (is_delegate(each.candidate)) delegate = &each;
    if (!usable(each)) continue;
    if (fastest == nullptr || each.median_us < fastest->median_us) fastest = &each;
  }
  if (fastest == nullptr) return nullptr;
  const auto native = std::find_if(entry.begin(), entry.end(), [&](const Measurement& each) {
    const bool equal = each.median_us <= fastest->median_us * kEqual;
    return usable(each) && (equal || each.low_us <= fastest->high_us);
  });
  if (delegate == nullptr || !limits.delegate) return &*native;
  if (limits.on_device) {
    const auto is_clearly_faster = [&](const Measurement& each) {
      return each.median_us * kClearlyFaster <= delegate->median_us &&
             each.high_us < delegate->low_us;
    };
    if (is_clearly_faster(*native)) return &*native;
    return is_clearly_faster(*fastest) ? fastest : delegate;
  }
  const bool faster = delegate->median_us * kBeyondNoise <= fastest->median_us &&
                      delegate->high_us < fastest->low_us;
  return faster ? delegate : &*native;
}

std::optional<int> TimingTable::nearest(Collective collective, int bucket) const {
  for (int distance = 0; distance < kNumBuckets; ++distance) {
    for (const int other : {bucket + distance, bucket - distance}) {
      if (other >= 0 && other < kNumBuckets && !at(collective, other).empty()) return other;
    }
  }
  return std::nullopt;
}

}  // namespace dpt
