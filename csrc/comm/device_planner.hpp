// Plans operations on a group's devices: natively, by the delegate, or by both at a time.
//
// Locks: all functions with the order of submission held.
#pragma once

#include <optional>
#include <string>

#include "comm/device_membership.hpp"
#include "comm/group_facts.hpp"
#include "comm/transports.hpp"
#include "cuda/plan.hpp"

namespace dpt {

class DevicePlanner {
 public:
  DevicePlanner(const GroupFacts& facts, const Transports& transports, DeviceMembership& membership)
      : facts_(facts), transports_(transports), membership_(membership) {}

  // Meets the other ranks and measures with them where that is still to be done. `lasts`: whether
  // the plan is the same for all requests like this one from now on.
  DevicePlan plan(const dpt_request& request, bool* lasts);
  // The plan, if there is no need to meet the other ranks for it, or to look at the stream.
  std::optional<DevicePlan> settled_plan(const dpt_request& request);

 private:
  std::string why_not_native(const dpt_request& request) const;
  // This is for devices that have met.
  std::string why_not_joined(const dpt_request& request) const;
  // Nobody has measured yet who is faster.
  bool is_open(const dpt_request& request) const;

  const GroupFacts& facts_;
  const Transports& transports_;
  DeviceMembership& membership_;
};

}  // namespace dpt
