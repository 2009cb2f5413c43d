// Counts who comes last to a group's operations, and adds up how long this rank waits for it.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace dpt {

// Thread safety: all functions from any thread.
class Arrivals {
 public:
  struct Rank {
    int64_t global_rank;
    uint64_t times_last = 0;
    uint64_t cost_ns = 0;  // how long all others together waited for it alone, in those
  };
  struct Sums {
    uint64_t operations = 0;
    uint64_t waited_ns = 0;
    std::vector<Rank> ranks;  // of this node
  };

  explicit Arrivals(const std::vector<int64_t>& global_ranks) {
    for (const int64_t rank : global_ranks) sums_.ranks.push_back({rank});
  }

  // Counts an operation. `last` is the rank of the node that came last, and `cost_ns` how much
  // later it came than the last but one. `waited_ns` is how long this rank was there before all
  // were.
  void add(int last, uint64_t cost_ns, uint64_t waited_ns) {
    const std::lock_guard lock(mutex_);
    sums_.operations += 1;
    sums_.waited_ns += waited_ns;
    sums_.ranks[last].times_last += 1;
    sums_.ranks[last].cost_ns += cost_ns;
  }

  Sums sums() const {
    const std::lock_guard lock(mutex_);
    return sums_;
  }

  void reset() {
    const std::lock_guard lock(mutex_);
    for (Rank& rank : sums_.ranks) rank = {rank.global_rank};
    sums_.operations = sums_.waited_ns = 0;
  }

 private:
  mutable std::mutex mutex_;
  Sums sums_;
};

}  // namespace dpt
