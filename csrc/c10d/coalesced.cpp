// Several operations that are one call of the program's: a list of one kind, or what it starts
// between startCoalescing and endCoalescing.
//
// NOTE [Coalesced] NCCL makes one kernel of a list that it is given in one piece, and ranks must
// give it the same pieces. So the core is asked which of the list are the stock backend's, and
// finds the same ones on all ranks: all of them where native code would be kernels one after
// another, else those that are settled to be. Each other goes its own way.
#include <c10/util/ScopeExit.h>

#include <algorithm>

#include "backend.hpp"

namespace dpt::c10d_adapter {
namespace {

// While coalesced() asks what it is that would be started. All is checked then, before anything is.
struct Asking {
  const Backend* backend;
  at::Device device;
  std::vector<dpt_request> requests = {};
  bool are_plain = true;
};
thread_local Asking* asking = nullptr;

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

// The tensors of a list, with copies in place of those that share memory with others of it: each is
// then reduced once, as if the list was one message.
std::vector<at::Tensor> apart(const std::vector<at::Tensor>& list) {
  using Bytes = std::pair<const char*, const char*>;
  const auto bytes_of = [](const at::Tensor& tensor) -> Bytes {
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    int64_t last = 0;
    for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    return {begin, tensor.numel() == 0 ? begin : begin + (last + 1) * tensor.element_size()};
  };
  std::vector<std::pair<Bytes, size_t>> order;
  order.reserve(list.size());
  for (size_t i = 0; i < list.size(); ++i) order.emplace_back(bytes_of(list[i]), i);
  std::sort(order.begin(), order.end());
  std::vector<at::Tensor> result = list;
  const char* end = nullptr;
  for (size_t i = 1; i < order.size(); ++i) {
    end = std::max(end, order[i - 1].first.second);
    if (order[i].first.first >= end) continue;
    for (const size_t place : {order[i - 1].second, order[i].second}) {
      if (result[place].is_same(list[place])) result[place] = list[place].clone();
    }
  }
  return result;
}

}  // namespace

bool Backend::is_only_asked_for(const Call& call) const {
  if (asking == nullptr || asking->backend != this) return false;
  asking->are_plain =
      asking->are_plain && device_of(call) == asking->device &&
      describe_plain(call, asking->device, &asking->requests.emplace_back(dpt_request{}));
  return true;
}

WorkPtr Backend::coalesced(c10d::OpType op_type,
                           const std::vector<at::Tensor>& inputs,
                           const std::vector<at::Tensor>& results,
                           c10::function_ref<WorkPtr(size_t)> start,
                           c10::function_ref<WorkPtr(c10d::Backend&, const Places&)> together) {
  std::vector<WorkPtr> parts;
  Places started;
  const bool is_debugged = setup_.inspect || setup_.compare;
  if (together && inputs.size() > 1 && inputs[0].is_cuda() && !coalescing_ && !is_debugged) {
    Asking mine{this, inputs[0].device()};
    {
      ++askers_;
      asking = &mine;
      const auto asked = c10::make_scope_exit([this] {
        asking = nullptr;
        --askers_;
      });
      for (size_t i = 0; i < inputs.size(); ++i) start(i);
    }
    // NCCL's backend refuses a list of several types, which may as well be one by one.
    const bool is_one_type =
        std::all_of(mine.requests.begin(), mine.requests.end(), [&](const dpt_request& each) {
          return each.dtype == mine.requests[0].dtype;
        });
    WorkPtr work;
    if (mine.are_plain && is_one_type)
      started = start_together(mine.device, mine.requests, together, &work);
    if (work) parts.push_back(std::move(work));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (std::binary_search(started.begin(), started.end(), i)) continue;
    if (WorkPtr part = start(i)) parts.push_back(std::move(part));
  }
  return join(op_type, std::move(parts), results);
}

WorkPtr Backend::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                     const c10d::AllreduceCoalescedOptions& options) {
  const bool on_host = std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& each) {
    return each.is_cpu() && each.layout() == at::kStrided;
  });
  const std::vector<at::Tensor> reduced = on_host ? apart(tensors) : tensors;
  const auto start = [&](size_t i) {
    std::vector<at::Tensor> one = {reduced[i]};
    return all_reduce_into(tensors[i], one, options);
  };
  const auto together = [&](c10d::Backend& stock, const Places& places) {
    std::vector<at::Tensor> some = at_places(tensors, places);
    return stock.allreduce_coalesced(some, options);
  };
  return coalesced(c10d::OpType::ALLREDUCE_COALESCED, tensors, tensors, start, together);
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
  const auto start = [&](size_t i) {
    std::vector<std::vector<at::Tensor>> one_output(1);
    for (const auto& of_rank : outputs) one_output[0].push_back(of_rank[i]);
    std::vector<at::Tensor> one_input = {inputs[i]};
    return allgather(one_output, one_input, options);
  };
  // NCCL's backend has none.
  return coalesced(c10d::OpType::ALLGATHER_COALESCED, inputs, results, start, nullptr);
}

WorkPtr Backend::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                 std::vector<at::Tensor>& inputs,
                                                 const c10d::AllgatherOptions& options) {
  check_as_many("all_gather_into_tensor_coalesced", outputs, inputs);
  const auto start = [&](size_t i) { return _allgather_base(outputs[i], inputs[i], options); };
  const auto together = [&](c10d::Backend& stock, const Places& places) {
    std::vector<at::Tensor> some_outputs = at_places(outputs, places);
    std::vector<at::Tensor> some_inputs = at_places(inputs, places);
    return stock.allgather_into_tensor_coalesced(some_outputs, some_inputs, options);
  };
  return coalesced(c10d::OpType::COALESCED, inputs, outputs, start, together);
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                 std::vector<at::Tensor>& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  check_as_many("reduce_scatter_tensor_coalesced", outputs, inputs);
  const auto start = [&](size_t i) { return _reduce_scatter_base(outputs[i], inputs[i], options); };
  const auto together = [&](c10d::Backend& stock, const Places& places) {
    std::vector<at::Tensor> some_outputs = at_places(outputs, places);
    std::vector<at::Tensor> some_inputs = at_places(inputs, places);
    return stock.reduce_scatter_tensor_coalesced(some_outputs, some_inputs, options);
  };
  return coalesced(c10d::OpType::COALESCED, inputs, outputs, start, together);
}

WorkPtr Backend::note_coalesced(WorkPtr work, const Call& call) {
  if (coalescing_) {
    if (work) coalesced_.push_back(work);
    coalesced_results_.insert(coalesced_results_.end(), call.results.begin(), call.results.end());
  }
  return work;
}

WorkPtr Backend::join(c10d::OpType op_type,
                      std::vector<WorkPtr> parts,
                      std::vector<at::Tensor> results) {
  if (parts.size() == 1) return parts[0];
  return c10::make_intrusive<JoinedWork>(rank_, op_type, std::move(parts), std::move(results));
}

void Backend::startCoalescing() {
  coalescing_ = true;
  coalesced_.clear();
  coalesced_results_.clear();
  coalescing_delegates_.clear();
}

WorkPtr Backend::endCoalescing() {
  coalescing_ = false;
  for (const BackendPtr& delegate : std::exchange(coalescing_delegates_, {})) {
    coalesced_.push_back(delegate->endCoalescing());
  }
  return join(c10d::OpType::COALESCED,
              std::exchange(coalesced_, {}),
              std::exchange(coalesced_results_, {}));
}

}  // namespace dpt::c10d_adapter
