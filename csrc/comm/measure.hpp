// Times candidate plans in the middle of a program: all ranks run each of them on scratch memory,
// in turns, and see the same times.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "comm/calibration.hpp"
#include "tuner/table.hpp"

namespace dpt {

// Every rank's `bytes` at `mine`, in rank order, as `exchange` does.
std::vector<char> exchange_bytes(const RunContext& context, const void* mine, size_t bytes);

// Most ranks of a group that spans nodes and measures: what they tell each other must fit.
constexpr int kMostMeasuringRanks = 64;

// Every rank's `mine`, in rank order. Leaves the segment's staging memory quiet: before it every
// rank has ended what it did there, and after it no rank reads what was exchanged.
template <typename T>
std::vector<T> exchange(const RunContext& context, const T& mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  static_assert(sizeof(T) <= Segment::kSmallBytes / kMostMeasuringRanks);
  const std::vector<char> bytes = exchange_bytes(context, &mine, sizeof mine);
  std::vector<T> all(bytes.size() / sizeof(T));
  std::memcpy(static_cast<void*>(all.data()), bytes.data(), bytes.size());
  return all;
}

// Times the plans for a collective in host memory, and the delegate unless it is nullptr. Nothing
// when a rank lacks the memory. Takes about a tenth of a second, more where one operation does.
class HostBench final : public Bench {
 public:
  HostBench(const TuningClass& group, const dpt_delegate* delegate)
      : group_(group), delegate_(delegate) {}

  Result measure(const RunContext& context, int bucket) override;

 private:
  const TuningClass& group_;
  const dpt_delegate* delegate_;
};

}  // namespace dpt
