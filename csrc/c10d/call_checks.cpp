#include "call_checks.hpp"

namespace dpt::c10d_adapter {

std::string CallChecks::signature_of(const Call& call) {
  const at::TensorList one = call.gives_parts() ? call.outputs : call.inputs;
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

void CallChecks::inspect_inputs(const Call& call, uint64_t sequence, dpt_comm* comm) const {
  const auto op = call.reduce_op.op_;
  const bool sums =
      op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG || op == c10d::ReduceOp::PREMUL_SUM;
  const bool reduces = call.op_type == c10d::OpType::ALLREDUCE ||
                       call.op_type == c10d::OpType::REDUCE ||
                       call.op_type == c10d::OpType::REDUCE_SCATTER ||
                       call.op_type == c10d::OpType::_REDUCE_SCATTER_BASE;
  if (!sums || !reduces) return;
  for (const at::Tensor& tensor : call.inputs) {
    const std::string fault = setup_.hooks.inspect(tensor);
    if (fault.empty()) continue;
    const c10d::Backend::Options& options = *setup_.options;
    const std::string text = join_text({call.title,
                                        " #",
                                        std::to_string(sequence),
                                        " of group ",
                                        options.group_name,
                                        ": rank ",
                                        std::to_string(options.global_ranks_in_group[setup_.rank]),
                                        " gave ",
                                        fault});
    setup_.api->comm_abort(comm, text.c_str());
    std::rethrow_exception(make_exception(DPT_ERR_ABORTED, text));
  }
}

}  // namespace dpt::c10d_adapter
