// A rank's membership in its group on devices. The ranks join there at their first operation on a
// device, find out what is fastest as sizes come, and leave at the group's end.
//
// Locks: all functions with the order of submission held, but `leave` by the last thread. The ranks
// meet in the group's turn besides (comm/progress.hpp), as operations on host memory use the same
// signals. The group's state is locked inside.
#pragma once

#include <functional>
#include <memory>

#include "comm/calibration.hpp"
#include "comm/device_watch.hpp"
#include "comm/group_parts.hpp"
#include "comm/joined_device.hpp"

namespace dpt {

class DeviceMembership {
 public:
  DeviceMembership(const dpt_comm_options& options, const GroupParts& parts);

  // nullptr: no operation that may be native has come yet.
  const JoinedDevice* joined() const { return joined_.get(); }
  bool is_staged() const { return joined_ && joined_->staged; }
  const GroupTuning& tuning() const { return tuning_; }  // once joined

  // Joins with the request's device, unless that has been done.
  void join(const dpt_request& request);
  // All ranks find out what is fastest for the request's range of sizes, which is open.
  void settle(const dpt_request& request, size_t bytes);
  // Ends what this rank has on devices.
  void leave();

  // A native operation has failed, or nothing may begin any more.
  bool is_broken() const;
  // Throws Error, and fails the group, where that is so.
  void check(const dpt_request& request);
  // The same where devices are staged through the host's memory and the segment has ended, or a
  // rank is lost: nothing of this rank may be under way that could tell.
  void check_staged(const dpt_request& request);

 private:
  // Runs `task` with what it needs to meet the other ranks, in turn with the group's operations on
  // host memory.
  void run_in_turn(const dpt_request& request, const std::function<void(const WaitContext&)>& task);
  void meet(const dpt_request& request, const WaitContext& wait);
  void refuse_without_descriptors(const WaitContext& wait);

  const GroupFacts& facts_;
  GroupState& state_;
  const Transports& transports_;
  SubmitOrder& order_;
  GroupBootstrap& bootstrap_;
  Progress& progress_;
  std::unique_ptr<JoinedDevice> joined_;  // made by the first operation on a GPU
  DeviceWatch watch_;                     // of joined_
  GroupTuning tuning_;                    // once joined_ is there
};

}  // namespace dpt
