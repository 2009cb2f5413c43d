// Sends and receives of a group: the ranks join for them without a collective, and one engine
// carries them out (comm/point_to_point.hpp).
//
// Locks: `mutex_` guards the making of the engine, and no other lock of the communicator is taken
// inside. Messages don't take the order of submission: they never wait for collectives. Thread
// safety: `submit` from any thread, `drain` and `end` when nobody submits any more.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>

#include "comm/delegation.hpp"
#include "comm/group_bootstrap.hpp"
#include "comm/group_facts.hpp"
#include "comm/group_state.hpp"
#include "comm/point_to_point.hpp"

namespace dpt {

class Messages {
 public:
  Messages(const GroupFacts& facts,
           GroupState& state,
           Delegation& delegation,
           GroupBootstrap& bootstrap)
      : facts_(facts), state_(state), delegation_(delegation), bootstrap_(bootstrap) {}

  // `recorded`: receives the operation's number in the flight record, as soon as it has one.
  dpt_outcome submit(const dpt_request& request,
                     dpt_done done,
                     void* done_context,
                     uint64_t* recorded);
  // Waits until nothing is under way; false when `timeout` passed first.
  bool drain(std::chrono::milliseconds timeout) { return !engine_ || engine_->drain(timeout); }
  // Ends what is still unfinished with an error.
  void end() { engine_.reset(); }

 private:
  PointToPoint& engine();

  const GroupFacts& facts_;
  GroupState& state_;
  Delegation& delegation_;
  GroupBootstrap& bootstrap_;
  std::mutex mutex_;
  std::unique_ptr<PointToPoint> engine_;  // made by the first send or receive
};

}  // namespace dpt
