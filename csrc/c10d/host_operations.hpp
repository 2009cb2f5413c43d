// The road of operations on host memory: Call -> dpt_request -> core -> NativeWork or the
// delegate's Work.
//
// Thread safety: it holds no state of its own. As c10d asks: any thread, operations in call order.
#pragma once

#include <optional>
#include <string>

#include "operation_parts.hpp"
#include "submitted.hpp"

namespace dpt::c10d_adapter {

class HostOperations {
 public:
  explicit HostOperations(const OperationParts& parts) : parts_(parts) {}

  WorkPtr submit(Call&& call, const Replay& replay, uint64_t sequence);
  // Carries out an operation on the delegate, which leaves no work behind. `why`: the reason, for
  // the core.
  void run_on_delegate(Call&& call, const Replay& replay, const char* why);

 private:
  // Gives an operation to the delegate, whatever the core thinks of it. It returns once the
  // delegate has it.
  void hand_over(Submitted& submitted, const std::optional<std::string>& not_native);

  const OperationParts parts_;
};

}  // namespace dpt::c10d_adapter
