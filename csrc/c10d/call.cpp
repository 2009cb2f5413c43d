#include "call.hpp"

#include "in_collective.hpp"

namespace dpt::c10d_adapter {

void Call::note_written() const {
  const bool gloo_copies = collective == DPT_ALL_GATHER || collective == DPT_GATHER ||
                           collective == DPT_REDUCE_SCATTER || op_type == c10d::OpType::ALLTOALL;
  const bool nccl_copies = op_type == c10d::OpType::ALLGATHER;
  if (!(device().is_cpu() ? gloo_copies : nccl_copies)) return;
  for (const at::Tensor& tensor : results) {
    if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

Contiguous::Direction Call::in_place_direction(int rank) const {
  using Direction = Contiguous::Direction;
  const bool is_root = root == rank;
  if (collective == DPT_BROADCAST) return is_root ? Direction::kInput : Direction::kOutput;
  if (collective == DPT_REDUCE && !is_root) return Direction::kInput;
  return Direction::kInPlace;
}

[[gnu::hot]] void Call::note_given(int ranks) const {
  if (ranks == 1) return;  // there is nobody to give it to
  uint64_t elements = 0;
  uint64_t bytes = 0;
  // Not nbytes, which sparse tensors refuse.
  for (const at::Tensor& tensor : inputs.empty() ? outputs : inputs) {
    elements += static_cast<uint64_t>(tensor.numel());
    bytes += static_cast<uint64_t>(tensor.numel()) * tensor.itemsize();
  }
  if (elements > 1) c10d_adapter::note_given(bytes);
}

[[gnu::hot]] dpt_request Call::describe() const {
  const bool has_outputs_only = gives_parts() || collective == DPT_RECV;
  const at::TensorList one = has_outputs_only ? outputs : inputs;
  const bool reduces = core_reduce_op != DPT_NO_REDUCE;
  const Elements elements = one.empty() ? Elements{DPT_UINT8, 0} : elements_of(one[0], reduces);
  return {.collective = collective,
          .dtype = elements.dtype,
          .reduce_op = core_reduce_op,
          .premul_factor = reduces ? premul_factor_of(reduce_op) : 1,
          .root = root,
          .tag = tag,
          .count = elements.count,
          .asynchronous = asynchronous,
          .source = source.get()};
}

}  // namespace dpt::c10d_adapter
