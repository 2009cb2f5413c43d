// One call on its way through the core and, perhaps, the delegate.
#pragma once

#include <c10/core/Stream.h>

#include "backend.hpp"

namespace dpt::c10d_adapter {

struct Backend::Submitted {
  Backend& backend;
  Call call;
  WorkPtr delegated;  // the delegate's work, when it was the one to carry out the call
  std::exception_ptr failure;
  uint64_t recorded = 0;              // a delegated call's number in the flight record
  std::optional<c10::Stream> stream;  // of a native operation on an accelerator

  // Of its tensors; the host's where it has none.
  at::Device device() const {
    if (!call.inputs.empty()) return call.inputs[0].device();
    if (!call.outputs.empty()) return call.outputs[0].device();
    return at::kCPU;
  }
};

// Elements of each tensor.
std::vector<size_t> counts_of(const std::vector<at::Tensor>& tensors);

}  // namespace dpt::c10d_adapter
