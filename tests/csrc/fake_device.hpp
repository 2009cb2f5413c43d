// Threads and host memory play GPUs here, in the place of csrc/cuda. Linked into the tests, they
// let all of csrc/comm run as it does on GPUs. Time on them is what a test says it is.
#pragma once

#include <functional>
#include <string>

#include "base/types.hpp"
#include "cuda/device_group.hpp"
#include "cuda/plan.hpp"

namespace dpt::testing {

struct FakeDevices {
  std::string why_absent = "no GPUs in this test";  // empty: every rank has one
  bool peer_access = true;                          // false: staged, by fake copy engines
  std::string links;                                // between them, see parse_links; empty: NVLink
  int unmappable_rank = -1;                         // its staging memory can't be mapped
  bool shared = false;                              // all ranks use the same one
  bool idle = true;                                 // streams become idle
  bool waiting = false;                             // a kernel waits for another rank
  bool queues = true;                               // see DeviceTrials::can_queue
  size_t free_bytes = size_t{1} << 30;
  double staged_us = 0;  // what takes an operation of those that are staged
  // Microseconds that a plan takes for so many bytes.
  std::function<double(const DevicePlan& plan, size_t bytes)> time_us;
};

// One for all tests; each sets it anew.
FakeDevices& fake_devices();

// Without peer access, operations' streams are FakeLane* (fake_copy_engine.hpp).

// From now on the kernels of every group have left this behind; nothing: none has.
void fail_devices(std::optional<DeviceGroup::Failure> failure);
// How often groups were told since then that their kernels may end.
int devices_released();

// Lets time pass on this thread's device.
void advance_device(double time_us);

}  // namespace dpt::testing
