// Watches a group's device: kernels that gave up, and what waits there for a rank that is lost.
//
// Locks: it has none of its own. `watch` runs in the watchdog's thread alone, which has the
// fabric's lock then (comm/fabric.hpp): the group's state is locked inside. `error_of` and
// `abandon_delegate` from any thread.
#pragma once

#include "base/error.hpp"
#include "comm/group_facts.hpp"
#include "comm/group_state.hpp"
#include "comm/joined_device.hpp"
#include "comm/lost_rank.hpp"

namespace dpt {

class DeviceWatch {
 public:
  DeviceWatch(const GroupFacts& facts, GroupState& state) : facts_(facts), state_(state) {}

  // From now on until `stop` has returned. The group has a segment.
  void start(const JoinedDevice& joined);
  void stop();

  // Says what came of a native operation, and who may be to blame.
  Error error_of(const DeviceGroup::Failure& failure) const;
  // Abandons NCCL's part where errors are raised and it may wait without end.
  void abandon_delegate() const;

 private:
  // Several times a second and after each death. True: there is nothing left to watch.
  bool watch();
  bool watch_delegate();

  const GroupFacts& facts_;
  GroupState& state_;
  const JoinedDevice* joined_ = nullptr;  // constant from `start` on
  LostRank lost_;                         // of the watchdog's thread, but for who it is
};

}  // namespace dpt
