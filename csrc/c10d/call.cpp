// Facts of one call before it starts: its request, its name, and what its tensors are for.
#include <ATen/record_function.h>

#include "backend.hpp"
#include "in_collective.hpp"
#include "submitted.hpp"

namespace dpt::c10d_adapter {

// Tells autograd of outputs that gloo or NCCL copies into: a graph that has saved one refuses its
// backward pass.
void Backend::note_written(const Call& call) {
  const bool gloo_copies = call.collective == DPT_ALL_GATHER || call.collective == DPT_GATHER ||
                           call.collective == DPT_REDUCE_SCATTER ||
                           call.op_type == c10d::OpType::ALLTOALL;
  const bool nccl_copies = call.op_type == c10d::OpType::ALLGATHER;
  if (!(device_of(call).is_cpu() ? gloo_copies : nccl_copies)) return;
  for (const at::Tensor& tensor : call.results) {
    if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void Backend::check_open(const Call& call) const {
  if (comm_ != nullptr) return;
  std::rethrow_exception(make_exception(DPT_ERR_ABORTED,
                                        join_text({"deepytorch: ",
                                                   call.title,
                                                   ": process group ",
                                                   setup_.options->group_name,
                                                   " was destroyed"})));
}

// Tells what this rank's tensors are for.
Contiguous::Direction Backend::in_place_direction(const Call& call) const {
  using Direction = Contiguous::Direction;
  const bool is_root = call.root == rank_;
  if (call.collective == DPT_BROADCAST) return is_root ? Direction::kInput : Direction::kOutput;
  if (call.collective == DPT_REDUCE && !is_root) return Direction::kInput;
  return Direction::kInPlace;
}

// Some of a list is counted twice, which does no harm: the question is whether it may be gradients.
[[gnu::hot]] void Backend::note_given(const Call& call) const {
  if (size_ == 1) return;  // there is nobody to give it to
  uint64_t elements = 0;
  uint64_t bytes = 0;
  // Not nbytes, which sparse tensors refuse.
  for (const at::Tensor& tensor : call.inputs.empty() ? call.outputs : call.inputs) {
    elements += static_cast<uint64_t>(tensor.numel());
    bytes += static_cast<uint64_t>(tensor.numel()) * tensor.itemsize();
  }
  if (elements > 1) c10d_adapter::note_given(bytes);
}

std::string Backend::profiled_as(const Call& call, at::DeviceType device) const {
  if (!at::hasCallbacks()) return "";
  const char* const stock = device == at::kCPU ? "gloo" : "nccl";
  return join_text({setup_.own_name ? "deepytorch" : stock, ":", call.title});
}

std::string Backend::signature_of(const Call& call) const {
  const bool gives_parts = call.collective == DPT_REDUCE_SCATTER || call.collective == DPT_SCATTER;
  const at::TensorList one = gives_parts ? call.outputs : call.inputs;
  const std::string name = call.title;
  if (call.collective == DPT_BARRIER || one.empty()) return name;
  const std::string parts =
      call.uneven ? "uneven parts of " : join_text({std::to_string(one[0].numel()), " x "});
  std::string text = join_text({name, " of ", parts, c10::toString(one[0].scalar_type())});
  if (one[0].layout() != at::kStrided) text += ", not strided";
  if (call.core_reduce_op != DPT_NO_REDUCE) {
    // In the order of c10d's enum.
    constexpr const char* kNames[] = {
        "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
    const size_t op = static_cast<uint8_t>(static_cast<c10d::ReduceOp::RedOpType>(call.reduce_op));
    text += join_text({", ", op < std::size(kNames) ? kNames[op] : "another reduce op"});
  }
  const bool has_root = call.collective == DPT_BROADCAST || call.collective == DPT_REDUCE ||
                        call.collective == DPT_GATHER || call.collective == DPT_SCATTER;
  if (has_root) text += join_text({", root ", std::to_string(call.root)});
  return text;
}

dpt_request Backend::describe(Submitted& submitted) const {
  dpt_request request = describe(submitted.call);
  request.call = &submitted;
  request.recorded = &submitted.recorded;
  request.timeout_ms = limit_of(submitted.call).count();
  return request;
}

[[gnu::hot]] dpt_request Backend::describe(const Call& call) {
  const bool gives_parts = call.collective == DPT_REDUCE_SCATTER || call.collective == DPT_SCATTER;
  const bool has_outputs_only = gives_parts || call.collective == DPT_RECV;
  const at::TensorList one = has_outputs_only ? call.outputs : call.inputs;
  const bool reduces = call.core_reduce_op != DPT_NO_REDUCE;
  const Elements elements = one.empty() ? Elements{DPT_UINT8, 0} : elements_of(one[0], reduces);
  return {.collective = call.collective,
          .dtype = elements.dtype,
          .reduce_op = call.core_reduce_op,
          .premul_factor = reduces ? premul_factor_of(call.reduce_op) : 1,
          .root = call.root,
          .tag = call.tag,
          .count = elements.count,
          .asynchronous = call.asynchronous,
          .source = call.source.get()};
}

void Backend::check_root(const char* op, int64_t root) const {
  DPT_CHECK_VALUE(root >= 0 && root < size_,
                  {op,
                   " on rank ",
                   std::to_string(rank_),
                   ": root ",
                   std::to_string(root),
                   " is not a rank of this group of ",
                   std::to_string(size_)});
}

}  // namespace dpt::c10d_adapter
