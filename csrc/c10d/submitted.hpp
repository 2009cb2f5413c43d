// One call on its way through the core and, perhaps, the delegate.
#pragma once

#include <c10/core/Stream.h>

#include "backend.hpp"

namespace dpt::c10d_adapter {

struct Backend::Submitted {
  Submitted(Backend& of, Call what, const Replay& how)
      : backend(of), call(std::move(what)), replay(&how) {}
  Submitted(const Submitted&) = delete;
  Submitted& operator=(const Submitted&) = delete;

  Backend& backend;
  Call call;
  const Replay* replay;
  WorkPtr delegated;  // the delegate's work, when it was the one to carry out the call
  std::exception_ptr failure;
  uint64_t recorded = 0;                 // the call's number in the flight record
  std::optional<c10::Stream> stream;     // of a native operation on an accelerator
  std::function<void()> make_stand_ins;  // for that, before the stream is asked for; once

  // From here on it may outlive the call that it was made for.
  void keep() {
    inputs_ = call.inputs.vec();
    outputs_ = call.outputs.vec();
    results_ = call.results.vec();
    call.inputs = inputs_;
    call.outputs = outputs_;
    call.results = results_;
    kept_replay_ = replay->keep();
    replay = kept_replay_.get();
  }

  at::Device device() const { return call.device(); }

 private:
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> results_;
  std::unique_ptr<Replay> kept_replay_;
};

// Elements of each tensor.
std::vector<size_t> counts_of(at::TensorList tensors);

}  // namespace dpt::c10d_adapter
