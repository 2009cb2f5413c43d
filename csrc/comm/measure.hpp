// Times candidate plans in the middle of a program: all ranks run each of them on scratch memory,
// in turns, and see the same times.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "algorithms/algorithm.hpp"
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

struct Trials {
  size_t bytes;  // of one buffer
  std::vector<Candidate> plans;
};

// The times of the plans for the collective of `context.operation`, and of the delegate unless it
// is nullptr. The same on every rank; empty when a rank lacks the memory. Called by all ranks,
// after an `enter`. Takes about a tenth of a second, more where one operation does.
Entry measure(const RunContext& context, const Trials& what, const dpt_delegate* delegate);

}  // namespace dpt
