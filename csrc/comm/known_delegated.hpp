// Operations on a device of which it is settled that they are the delegate's.
//
// NOTE [Short way] Between two operations NCCL and CUDA push everything else out of the caches and
// the TLBs. So a call costs what it touches rather than what it computes. On two H100 a call cost 3
// to 4 us more than NCCL's own. With a fake GPU it cost as much once 1024 pages of code and of data
// were run through between calls (tests/conformance/test_short_way.py prints it). Without that it
// cost 0.4 us more. The call went through 94 pages of code. So what is known goes a short way: the
// adapter asks begin_known, starts the delegate itself and is done. The functions on it are marked
// hot, which lays them side by side. All that can be found out before is kept here. With that fake
// a call costs 1 us more this way.
//
// Thread safety: none; the order of submission guards it (comm/submit_order.hpp).
#pragma once

#include <algorithm>
#include <array>

#include "base/types.hpp"

namespace dpt {

struct StatisticsRow;

class KnownDelegated {
 public:
  struct Known {
    Collective collective;
    DataType dtype;
    ReduceOp reduce_op;
    int device;
    size_t count = 0;  // of one buffer; 0: none yet
    bool by_nodes;
    StatisticsRow* row;  // where it is counted
  };

  // Finds operations like `request`; nullptr: unknown.
  const Known* find(const dpt_request& request) const {
    for (const Known& known : sets_[set_of(request)]) {
      const bool is_like = known.count != 0 && known.count == request.count &&
                           known.collective == request.collective && known.dtype == request.dtype &&
                           known.reduce_op == request.reduce_op && known.device == request.device;
      if (is_like && is_plain(request)) return &known;
    }
    return nullptr;
  }

  // Nothing where it is known already: what is to be waited for takes the long way again. Forgets
  // another of the same set, the oldest, when that is full.
  void add(const dpt_request& request, bool by_nodes, StatisticsRow* row) {
    if (find(request) != nullptr) return;
    Set& set = sets_[set_of(request)];
    std::copy_backward(set.begin(), set.end() - 1, set.end());
    set[0] = {request.collective,
              request.dtype,
              request.reduce_op,
              request.device,
              request.count,
              by_nodes,
              row};
  }

  // It is described by its collective, type and size.
  static bool is_plain(const dpt_request& request) {
    return request.not_native == nullptr && request.input_counts == nullptr &&
           request.output_counts == nullptr;
  }

 private:
  // A training step has tens of sizes, and they come round again and again. A size that has no
  // place beside the others would never be known.
  static constexpr size_t kSets = 32;
  using Set = std::array<Known, 4>;

  static size_t set_of(const dpt_request& request) {
    // Sizes are often multiples of large powers of two.
    const size_t mixed = (request.count + request.collective) * 0x9E3779B97F4A7C15u;
    return (mixed >> 48) % kSets;
  }

  std::array<Set, kSets> sets_{};
};

}  // namespace dpt
