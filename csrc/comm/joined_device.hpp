// A rank's device in a group, as the ranks found it when they met there.
//
// Locks: it is made with the order of submission held, in the group's turn, and is then constant.
// Only `by_nodes` is settled after that, before the turn ends. The watchdog's thread reads the
// rest.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "cuda/device_group.hpp"

namespace dpt {

struct JoinedDevice {
  int device;
  std::string why_not;                 // not empty: the delegate serves this group's GPUs
  std::unique_ptr<DeviceGroup> group;  // unless there is a reason why not
  bool staged = false;                 // through the host's memory
  size_t staging_bytes = 0;
  bool by_nodes = false;  // the delegate may go through this group's nodes in stages
};

}  // namespace dpt
