// The road every operation takes: it is checked and counted, and goes to the part for its device.
//
// Thread safety: it holds no lock. As c10d asks: any thread, operations in call order.
#pragma once

#include "call_checks.hpp"
#include "coalesced_lists.hpp"
#include "device_operations.hpp"
#include "host_operations.hpp"

namespace dpt::c10d_adapter {

class Submission {
 public:
  Submission(const OperationParts& parts, DeviceStreams& streams)
      : parts_(parts), device_(parts, streams) {}
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;

  WorkPtr submit(Call&& call, const Replay& replay);
  // Carries out an operation on the delegate, which leaves no work behind. `why`: the reason, for
  // the core.
  void run_on_delegate(Call&& call, const Replay& replay, const char* why);
  CoalescedLists& lists() { return lists_; }
  c10::DeviceIndex first_device() const { return device_.first_device(); }

 private:
  const OperationParts parts_;
  CallChecks checks_{parts_.setup};
  HostOperations host_{parts_};
  DeviceOperations device_;
  CoalescedLists lists_{parts_, checks_, device_};
};

}  // namespace dpt::c10d_adapter
