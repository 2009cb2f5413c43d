// A request of c10d's: one operation, with the caller's tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "convert.hpp"
#include "deepytorch.h"

namespace dpt::c10d_adapter {

// The lists are the caller's, or temporary ones of the same expression.
struct Call {
  dpt_collective collective;
  c10d::OpType op_type;
  const char* title;  // c10d's name of the operation
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  bool asynchronous = true;
  at::TensorList inputs;
  at::TensorList outputs;
  bool in_place = false;             // outputs are the inputs
  bool uneven = false;               // the parts differ in size
  const char* not_native = nullptr;  // why the stock backend has to serve it
  c10d::ReduceOp reduce_op;
  dpt_reduce_op core_reduce_op = DPT_NO_REDUCE;
  int root = 0;
  int tag = 0;
  std::shared_ptr<int> source;  // of a recv: receives the sender's rank
  at::TensorList results;       // what the future gives; outputs when empty
  at::TensorList shown;         // whose shapes a profile tells; inputs when empty
  // Runs after a native operation, before anyone is told of its end.
  std::function<void()> after;

  // The device of its tensors; the host if it has none.
  at::Device device() const {
    if (!inputs.empty()) return inputs[0].device();
    if (!outputs.empty()) return outputs[0].device();
    return at::kCPU;
  }
  bool is_message() const { return collective == DPT_SEND || collective == DPT_RECV; }
  // Whether every rank gives a part to every other, or the root does.
  bool gives_parts() const { return collective == DPT_REDUCE_SCATTER || collective == DPT_SCATTER; }
  // Tells what this rank's tensors are for.
  Contiguous::Direction in_place_direction(int rank) const;
  // Makes the request, without its buffers and without what only matters once the operation waits
  // or the core starts it. `count` and `dtype` describe one buffer; unless parts are uneven, every
  // buffer has the same.
  dpt_request describe() const;
  // Tells autograd of outputs that gloo or NCCL copies into: a graph that has saved one refuses its
  // backward pass.
  void note_written() const;
  // Counts this rank's part in an operation of `ranks` ranks. Some of a list is counted twice,
  // which does no harm: the question is whether it may be gradients.
  void note_given(int ranks) const;
};

}  // namespace dpt::c10d_adapter
