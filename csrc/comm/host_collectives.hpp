// A group's collectives on host memory: picks a plan for each and runs it, in the caller's thread
// or on the group's progress thread.
//
// Locks: `submit` takes the order of submission, and holds it until the operation has its place in
// the queue. If the caller waits, it holds it until the operation has ended. Whatever runs in
// the group's turn (comm/progress.hpp) needs no lock: nothing else runs then.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "comm/calibration.hpp"
#include "comm/group_parts.hpp"
#include "tuner/choose.hpp"

namespace dpt {

class HostCollectives {
 public:
  HostCollectives(const dpt_comm_options& options, const GroupParts& parts);

  // `recorded`: receives the operation's number in the flight record, as soon as it has one.
  dpt_outcome submit(const dpt_request& request,
                     dpt_done done,
                     void* done_context,
                     uint64_t* recorded);
  // The ranks have met: they agree on how they tune. Called by every rank.
  void agree(const WaitContext& wait);

 private:
  // A request with its own copy of the pointer arrays, so that it outlives the call.
  struct Pending {
    Operation operation;
    Plan plan;  // known once the group is connected
    std::chrono::milliseconds timeout;
    void* call;
    uint64_t recorded;  // its number in the flight record
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    std::vector<size_t> input_counts;
    std::vector<size_t> output_counts;
  };

  std::string why_not_native(const Operation& operation) const;
  // Whether the plan is still to be found together with the other ranks, in prepare.
  bool undecided(const Operation& operation) const;
  Plan plan_for(const Operation& operation) const;
  ChooseRequest choose_request(const Operation& operation) const;
  // With the order of submission.
  std::shared_ptr<Pending> make_pending(const dpt_request& request);
  WaitContext wait_context(const Pending& pending, bool interruptible) const;
  void enqueue(std::shared_ptr<Pending> pending, dpt_done done, void* done_context);
  void run_and_wait(std::shared_ptr<Pending> pending);
  // Both in the group's turn. The first meets the ranks and tunes for the operation's size if that
  // is still to be done, then settles pending.plan.
  void prepare(Pending& pending, bool in_caller);
  void run(const Pending& pending, bool in_caller);

  const GroupFacts& facts_;
  GroupState& state_;
  const Transports& transports_;
  SubmitOrder& order_;
  Delegation& delegation_;
  GroupBootstrap& bootstrap_;
  Progress& progress_;
  GroupTuning tuning_;
};

}  // namespace dpt
