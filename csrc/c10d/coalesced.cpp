// c10d's entry points for lists of operations of one kind.
#include <algorithm>

#include "backend.hpp"

namespace dpt::c10d_adapter {
namespace {

void check_as_many(const char* op,
                   const std::vector<at::Tensor>& outputs,
                   const std::vector<at::Tensor>& inputs) {
  DPT_CHECK_VALUE(outputs.size() == inputs.size(),
                  {op,
                   ": ",
                   std::to_string(outputs.size()),
                   " outputs for ",
                   std::to_string(inputs.size()),
                   " inputs"});
}

std::vector<at::Tensor> at_places(const std::vector<at::Tensor>& list,
                                  const std::vector<size_t>& places) {
  std::vector<at::Tensor> some;
  some.reserve(places.size());
  for (const size_t place : places) some.push_back(list[place]);
  return some;
}

// On the host a list goes as one message, as with gloo. A profile shows one operation, and memory
// that is in the list twice is reduced once.
bool is_one_message(const std::vector<at::Tensor>& list) {
  return !list.empty() && std::all_of(list.begin(), list.end(), [&](const at::Tensor& each) {
    return each.is_cpu() && each.layout() == at::kStrided &&
           each.scalar_type() == list[0].scalar_type();
  });
}

bool have_sizes_of(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(), [](auto& a, auto& b) {
    return a.numel() == b.numel();
  });
}

at::Tensor flat(const std::vector<at::Tensor>& list) {
  std::vector<at::Tensor> parts;
  parts.reserve(list.size());
  for (const at::Tensor& each : list) parts.push_back(each.detach().reshape(-1));
  return at::cat(parts);
}

void copy_back(const std::vector<at::Tensor>& list, const at::Tensor& message) {
  int64_t begin = 0;
  for (const at::Tensor& each : list) {
    copy_as_made(each, message.narrow(0, begin, each.numel()).view(each.sizes()));
    begin += each.numel();
  }
}

}  // namespace

WorkPtr Backend::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                     const c10d::AllreduceCoalescedOptions& options) {
  if (is_one_message(tensors) && !is_integer_mean(options.reduceOp, tensors[0])) {
    const std::vector<at::Tensor> message = {flat(tensors)};
    return submit({.collective = DPT_ALL_REDUCE,
                   .op_type = c10d::OpType::ALLREDUCE_COALESCED,
                   .title = "all_reduce",
                   .timeout = options.timeout,
                   .asynchronous = options.asyncOp,
                   .inputs = message,
                   .outputs = message,
                   .in_place = true,
                   .reduce_op = options.reduceOp,
                   .core_reduce_op = to_reduce_op(options.reduceOp),
                   .results = tensors,
                   .shown = tensors,
                   .after = [tensors, message] { copy_back(tensors, message[0]); }},
                  replaying(
                      [](c10d::Backend& stock, auto& tensors, auto& options) {
                        return stock.allreduce_coalesced(tensors, options);
                      },
                      tensors,
                      options));
  }
  const auto start = [&](size_t i) {
    std::vector<at::Tensor> one = {tensors[i]};
    return allreduce(one, options);
  };
  const auto together = [&](c10d::Backend& stock, const CoalescedLists::Places& places) {
    std::vector<at::Tensor> some = at_places(tensors, places);
    return stock.allreduce_coalesced(some, options);
  };
  return submission_.lists().submit(
      c10d::OpType::ALLREDUCE_COALESCED, tensors, tensors, start, together);
}

WorkPtr Backend::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                     std::vector<at::Tensor>& inputs,
                                     const c10d::AllgatherOptions& options) {
  // c10d gives one list per rank here, each with one tensor per input.
  for (const auto& of_rank : outputs) {
    DPT_CHECK_VALUE(of_rank.size() == inputs.size(),
                    {"all_gather_coalesced: every rank's list needs ",
                     std::to_string(inputs.size()),
                     " tensors"});
  }
  std::vector<at::Tensor> results;
  for (const auto& of_rank : outputs) {
    results.insert(results.end(), of_rank.begin(), of_rank.end());
  }
  const bool fits = std::all_of(outputs.begin(), outputs.end(), [&](const auto& of_rank) {
    return is_one_message(of_rank) && have_sizes_of(inputs, of_rank) &&
           of_rank[0].scalar_type() == inputs[0].scalar_type();
  });
  if (is_one_message(inputs) && fits && outputs.size() == static_cast<size_t>(getSize())) {
    const at::Tensor message = flat(inputs);
    const at::Tensor whole = at::empty({getSize(), message.numel()}, message.options());
    const std::vector<at::Tensor> parts = whole.unbind();
    return submit({.collective = DPT_ALL_GATHER,
                   .op_type = c10d::OpType::ALLGATHER_COALESCED,
                   .title = "all_gather",
                   .timeout = options.timeout,
                   .asynchronous = options.asyncOp,
                   .inputs = {message},
                   .outputs = parts,
                   .results = results,
                   .shown = inputs,
                   .after = [results, whole] { copy_back(results, whole.view(-1)); }},
                  replaying(
                      [](c10d::Backend& stock, auto& outputs, auto& inputs, auto& options) {
                        return stock.allgather_coalesced(outputs, inputs, options);
                      },
                      outputs,
                      inputs,
                      options));
  }
  const auto start = [&](size_t i) {
    std::vector<std::vector<at::Tensor>> one_output(1);
    for (const auto& of_rank : outputs) one_output[0].push_back(of_rank[i]);
    std::vector<at::Tensor> one_input = {inputs[i]};
    return allgather(one_output, one_input, options);
  };
  // NCCL's backend has none.
  return submission_.lists().submit(
      c10d::OpType::ALLGATHER_COALESCED, inputs, results, start, nullptr);
}

WorkPtr Backend::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                 std::vector<at::Tensor>& inputs,
                                                 const c10d::AllgatherOptions& options) {
  check_as_many("all_gather_into_tensor_coalesced", outputs, inputs);
  const auto start = [&](size_t i) { return _allgather_base(outputs[i], inputs[i], options); };
  const auto together = [&](c10d::Backend& stock, const CoalescedLists::Places& places) {
    std::vector<at::Tensor> some_outputs = at_places(outputs, places);
    std::vector<at::Tensor> some_inputs = at_places(inputs, places);
    return stock.allgather_into_tensor_coalesced(some_outputs, some_inputs, options);
  };
  return submission_.lists().submit(c10d::OpType::COALESCED, inputs, outputs, start, together);
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                 std::vector<at::Tensor>& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  check_as_many("reduce_scatter_tensor_coalesced", outputs, inputs);
  const auto start = [&](size_t i) { return _reduce_scatter_base(outputs[i], inputs[i], options); };
  const auto together = [&](c10d::Backend& stock, const CoalescedLists::Places& places) {
    std::vector<at::Tensor> some_outputs = at_places(outputs, places);
    std::vector<at::Tensor> some_inputs = at_places(inputs, places);
    return stock.reduce_scatter_tensor_coalesced(some_outputs, some_inputs, options);
  };
  return submission_.lists().submit(c10d::OpType::COALESCED, inputs, outputs, start, together);
}

}  // namespace dpt::c10d_adapter
