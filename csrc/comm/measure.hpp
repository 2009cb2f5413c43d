// Times candidate plans in the middle of a program: all ranks run each of them on scratch memory,
// in turns, and see the same times.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "tuner/table.hpp"

namespace dpt {

// Every rank's `mine`, in rank order. Leaves the segment's staging memory quiet: before it every
// rank has ended what it did there, and after it no rank reads what was exchanged.
template <typename T>
std::vector<T> exchange(const RunContext& context, const T& mine) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= Segment::kSmallBytes);
  Segment& segment = context.segment;
  context.barrier();
  std::memcpy(segment.small(segment.rank(), 0), &mine, sizeof mine);
  context.barrier();
  std::vector<T> all(segment.size());
  for (int rank = 0; rank < segment.size(); ++rank) {
    std::memcpy(&all[rank], segment.small(rank, 0), sizeof(T));
  }
  context.barrier();
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
