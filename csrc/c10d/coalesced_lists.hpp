// Lists of operations of one kind, each of which is one call of the program's.
//
// NOTE [Coalesced] NCCL makes one kernel of a list that it is given in one piece, and ranks must
// give it the same pieces. So the core is asked which of the list are the stock backend's, and
// finds the same ones on all ranks. Where native code would be kernels one after another these are
// all, else those that are settled to be the stock backend's. Each other goes its own way.
//
// Thread safety: any thread. It has no lock: each thread asks by a variable of its own, and
// `askers_` counts the threads that do.
#pragma once

#include <atomic>
#include <vector>

#include "call_checks.hpp"
#include "device_operations.hpp"

namespace dpt::c10d_adapter {

class CoalescedLists {
 public:
  using Places = DeviceOperations::Places;

  CoalescedLists(const OperationParts& parts, const CallChecks& checks, DeviceOperations& device)
      : parts_(parts), checks_(checks), device_(device) {}

  // Starts the operations of a list; `start` starts one, by its place. On GPUs those that are the
  // stock backend's go there by `together`, in one piece, of which NCCL makes one kernel.
  WorkPtr submit(c10d::OpType op_type,
                 const std::vector<at::Tensor>& inputs,
                 const std::vector<at::Tensor>& results,
                 c10::function_ref<WorkPtr(size_t)> start,
                 DeviceOperations::Together together);
  // Whether `submit` only asks this thread for the call's request, and has it now.
  bool is_only_asked_for(const Call& call) const {
    return askers_.load(std::memory_order_relaxed) != 0 && take_request(call);
  }

 private:
  bool take_request(const Call& call) const;

  const OperationParts parts_;
  const CallChecks& checks_;
  DeviceOperations& device_;
  std::atomic<int> askers_{0};  // threads in `submit` that ask
};

}  // namespace dpt::c10d_adapter
