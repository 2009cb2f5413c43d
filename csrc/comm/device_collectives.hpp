// A group's collectives on devices: one kernel per operation on the caller's stream, or copies
// through the host's memory behind it, or the delegate.
//
// Locks: each function takes the order of submission and leaves it before the delegate is started;
// it guards the membership, the planner and what is known to be the delegate's. The group's state
// and its progress are locked inside. Thread safety: all functions from any thread, but `leave` by
// the last one.
#pragma once

#include "comm/delegation.hpp"
#include "comm/device_membership.hpp"
#include "comm/device_planner.hpp"
#include "comm/group_parts.hpp"
#include "comm/known_delegated.hpp"

namespace dpt {

class DeviceCollectives {
 public:
  DeviceCollectives(const dpt_comm_options& options, const GroupParts& parts);

  // `recorded`: receives the operation's number in the flight record, as soon as it has one.
  dpt_outcome submit(const dpt_request& request, uint64_t* recorded);
  // NOTE [Short way]: what dpt_api says of them.
  bool begin_known(const dpt_request& request, dpt_known* begun);
  dpt_status fail_known(const dpt_request& request,
                        uint64_t recorded,
                        dpt_status status,
                        const dpt_error& error);
  void begin_coalesced(const dpt_request* requests, size_t count, uint64_t* recorded, int* begun);
  // Ends what this rank has on devices.
  void leave() { membership_.leave(); }

 private:
  void launch(const dpt_request& request, const DevicePlan& plan);
  // The row that counts operations that are settled to be the delegate's, and flat; nullptr:
  // others.
  StatisticsRow* row_of_delegated(const dpt_request& request);

  // The short way looks at these.
  const GroupFacts& facts_;
  GroupState& state_;
  const Transports& transports_;
  SubmitOrder& order_;
  Delegation& delegation_;
  DeviceMembership membership_;
  DevicePlanner planner_;
  KnownDelegated known_;
};

}  // namespace dpt
