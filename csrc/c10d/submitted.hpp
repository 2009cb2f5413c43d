// One call on its way through the core and, perhaps, the delegate.
#pragma once

#include <c10/core/Stream.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "call.hpp"
#include "replay.hpp"

namespace dpt::c10d_adapter {

class DeviceOperations;

struct Submitted {
  Submitted(Call what, const Replay& how) : call(std::move(what)), replay(&how) {}
  Submitted(const Submitted&) = delete;
  Submitted& operator=(const Submitted&) = delete;

  Call call;
  const Replay* replay;
  WorkPtr delegated;  // the delegate's work, when it was the one to carry out the call
  std::exception_ptr failure;
  uint64_t recorded = 0;                  // the call's number in the flight record
  DeviceOperations* on_device = nullptr;  // those that it is one of; none: on host memory
  std::optional<c10::Stream> stream;      // of a native operation on an accelerator
  std::function<void()> make_stand_ins;   // for that, before the stream is asked for; once

  // From here on it may outlive the call that it was made for.
  void keep() {
    kept_ = Kept{call.inputs.vec(), call.outputs.vec(), call.results.vec(), replay->keep()};
    call.inputs = kept_->inputs;
    call.outputs = kept_->outputs;
    call.results = kept_->results;
    replay = kept_->replay.get();
  }

  // Makes the request, without its buffers but with the sizes of uneven parts. It points to this
  // object.
  dpt_request describe(std::chrono::milliseconds limit) {
    dpt_request request = call.describe();
    request.call = this;
    request.recorded = &recorded;
    request.timeout_ms = limit.count();
    if (call.uneven) {
      input_counts_ = counts_of(call.inputs);
      output_counts_ = counts_of(call.outputs);
    }
    request.input_counts = input_counts_.empty() ? nullptr : input_counts_.data();
    request.output_counts = output_counts_.empty() ? nullptr : output_counts_.data();
    return request;
  }

  at::Device device() const { return call.device(); }

 private:
  struct Kept {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> results;
    std::unique_ptr<Replay> replay;
  };

  std::optional<Kept> kept_;
  std::vector<size_t> input_counts_;
  std::vector<size_t> output_counts_;
};

}  // namespace dpt::c10d_adapter
