// The delegate's part in a group: operations that the stock backend carries out, and their order.
//
// NOTE [Order] The stock backend pairs collectives by the order in which each rank starts them.
// An operation of the progress thread that may turn out to be the delegate's starts there later, so
// whatever comes after it waits here. Sends and receives are paired by their tags.
//
// Locks: it has none of its own. The order of submission (comm/submit_order.hpp) is not held when
// an operation is started, as the delegate may wait for other ranks then. Thread safety: all
// functions from any thread.
#pragma once

#include <atomic>

#include "algorithms/algorithm.hpp"
#include "comm/group_facts.hpp"
#include "comm/group_state.hpp"
#include "comm/progress.hpp"

namespace dpt {

class Delegation {
 public:
  Delegation(const GroupFacts& facts, const GroupState& state, Progress& progress)
      : facts_(facts), state_(state), progress_(progress) {}

  // Starts the request, counts it as planned, and returns DPT_DELEGATED. Throws Error with what the
  // delegate failed with.
  dpt_outcome start(const dpt_request& request, const Plan& plan, uint64_t recorded);
  // `row`: where it is counted.
  dpt_outcome start(const dpt_request& request,
                    StatisticsRow* row,
                    bool by_nodes,
                    uint64_t recorded);

  // Carries out an operation of the progress thread to its end; `call` is the request's.
  struct Call {
    void* call;
    uint64_t recorded;
  };
  dpt_status run(const Operation& operation, const Plan& plan, Call call, dpt_error* error);

  // An operation goes to the progress thread that may turn out to be the delegate's; it has ended.
  void expect() { ++ahead_; }
  void settle() { --ahead_; }
  bool is_ahead() const { return ahead_ > 0; }
  // Host operations may be the delegate's too, and its order is the program's.
  void wait_for_host_operations(const dpt_request& request);

 private:
  const GroupFacts& facts_;
  const GroupState& state_;
  Progress& progress_;
  std::atomic<int> ahead_{0};  // the short way looks at it
};

}  // namespace dpt
