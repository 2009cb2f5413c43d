#include "hierarchy.hpp"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <exception>

#include "python_bridge.hpp"

namespace dpt::c10d_adapter {
namespace {

// A stage's work: what comes behind it, on this stream or in this thread, comes after it. What ran
// on the stream itself has none.
void finish(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

// An operation that has ended.
class Done : public c10d::Work {
 public:
  Done(int rank, c10d::OpType op_type, std::vector<at::Tensor> results)
      : c10d::Work(rank, op_type), results_(std::move(results)) {
    c10d::Work::finish();
  }
  std::vector<at::Tensor> result() override { return results_; }

 private:
  std::vector<at::Tensor> results_;
};

// A stage is waited for at once, so it may run where its caller is.
template <typename Options>
Options stage(Options options) {
  options.asyncOp = false;
  return options;
}

}  // namespace

Hierarchy::Hierarchy(Setup setup)
    : c10d::Backend(setup.rank, static_cast<int>(setup.node_of.size())),
      setup_(std::move(setup)),
      streams_(setup_.api) {
  std::vector<int> names;
  for (int rank = 0; rank < size_; ++rank) {
    const auto found = std::find(names.begin(), names.end(), setup_.node_of[rank]);
    const size_t node = found - names.begin();
    if (found == names.end()) {
      names.push_back(setup_.node_of[rank]);
      ranks_.emplace_back();
    }
    if (rank == rank_) local_rank_ = static_cast<int>(ranks_[node].size());
    ranks_[node].push_back(rank);
  }
  for (const std::vector<int>& node : ranks_) {
    TORCH_CHECK_VALUE(node.size() == ranks_[0].size(), "nodes with different numbers of ranks");
  }
}

bool Hierarchy::is_one_piece(int node) const {
  return ranks_[node].back() - ranks_[node].front() == num_local() - 1;
}

Hierarchy::WorkPtr Hierarchy::run(c10d::OpType op_type,
                                  bool asynchronous,
                                  const std::vector<at::Tensor>& tensors,
                                  const std::vector<at::Tensor>& results,
                                  const std::function<void()>& stages) {
  const at::Device device = tensors[0].device();
  ++sequence_;
  if (device.is_cpu()) {
    stages();
    return c10::make_intrusive<Done>(rank_, op_type, results);
  }
  const c10::Stream stream = streams_.begin(device, asynchronous);
  {
    // Also what the stages allocate belongs to this stream, and is free again behind them.
    const c10::StreamGuard guard(stream);
    stages();
  }
  streams_.end(stream);
  auto work =
      c10::make_intrusive<DeviceWork>(rank_, op_type, "deepytorch:by_nodes", sequence_, results);
  work->started(stream, tensors);
  return work;
}

void Hierarchy::gather_in_stages(const at::Tensor& output,
                                 const at::Tensor& input,
                                 const c10d::AllgatherOptions& options) {
  const auto inner = stage(options);
  const at::Tensor mine = input.reshape({-1});
  at::Tensor of_nodes = at::empty({num_nodes(), mine.numel()}, mine.options());
  at::Tensor rails = of_nodes.view({-1});
  at::Tensor part = mine;
  finish(setup_.rail->_allgather_base(rails, part, inner));
  const at::Tensor all = output.view({size_, mine.numel()});
  for (int node = 0; node < num_nodes(); ++node) {
    at::Tensor from = of_nodes[node];
    if (is_one_piece(node)) {
      at::Tensor to = all.narrow(0, ranks_[node][0], num_local()).view({-1});
      finish(setup_.local->_allgather_base(to, from, inner));
      continue;
    }
    at::Tensor to = at::empty({num_local() * mine.numel()}, mine.options());
    finish(setup_.local->_allgather_base(to, from, inner));
    for (int i = 0; i < num_local(); ++i) {
      all[ranks_[node][i]].copy_(to.view({num_local(), -1})[i]);
    }
  }
}

void Hierarchy::reduce_in_stages(const at::Tensor& output,
                                 const at::Tensor& input,
                                 const c10d::ReduceScatterOptions& options) {
  const auto inner = stage(options);
  // Factors are applied once.
  auto outer = inner;
  if (options.reduceOp == c10d::ReduceOp::PREMUL_SUM) outer.reduceOp = c10d::ReduceOp::SUM;
  const at::Tensor all = input.view({size_, output.numel()});
  at::Tensor of_nodes = at::empty({num_nodes(), output.numel()}, output.options());
  for (int node = 0; node < num_nodes(); ++node) {
    at::Tensor from;
    if (is_one_piece(node)) {
      from = all.narrow(0, ranks_[node][0], num_local()).view({-1});
    } else {
      std::vector<at::Tensor> parts;
      for (const int rank : ranks_[node]) parts.push_back(all[rank]);
      from = at::cat(parts);
    }
    at::Tensor to = of_nodes[node];
    finish(setup_.local->_reduce_scatter_base(to, from, inner));
  }
  at::Tensor rails = of_nodes.view({-1});
  at::Tensor to = output.view({-1});
  finish(setup_.rail->_reduce_scatter_base(to, rails, outer));
}

Hierarchy::WorkPtr Hierarchy::_allgather_base(at::Tensor& output,
                                              at::Tensor& input,
                                              const c10d::AllgatherOptions& options) {
  return run(c10d::OpType::_ALLGATHER_BASE, options.asyncOp, {output, input}, {output}, [&, this] {
    gather_in_stages(output, input, options);
  });
}

Hierarchy::WorkPtr Hierarchy::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::AllgatherOptions& options) {
  std::vector<at::Tensor> tensors = outputs[0];
  tensors.push_back(inputs[0]);
  return run(c10d::OpType::ALLGATHER, options.asyncOp, tensors, outputs[0], [&, this] {
    const at::Tensor whole = at::empty({size_, inputs[0].numel()}, inputs[0].options());
    gather_in_stages(whole, inputs[0], options);
    for (int rank = 0; rank < size_; ++rank) {
      outputs[0][rank].copy_(whole[rank].view(outputs[0][rank].sizes()));
    }
  });
}

Hierarchy::WorkPtr Hierarchy::_reduce_scatter_base(at::Tensor& output,
                                                   at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  return run(
      c10d::OpType::_REDUCE_SCATTER_BASE, options.asyncOp, {output, input}, {output}, [&, this] {
        reduce_in_stages(output, input, options);
      });
}

Hierarchy::WorkPtr Hierarchy::reduce_scatter(std::vector<at::Tensor>& outputs,
                                             std::vector<std::vector<at::Tensor>>& inputs,
                                             const c10d::ReduceScatterOptions& options) {
  std::vector<at::Tensor> tensors = inputs[0];
  tensors.push_back(outputs[0]);
  return run(c10d::OpType::REDUCE_SCATTER, options.asyncOp, tensors, outputs, [&, this] {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& each : inputs[0]) parts.push_back(each.reshape({-1}));
    reduce_in_stages(outputs[0], at::cat(parts), options);
  });
}

Hierarchy::WorkPtr Hierarchy::allreduce(std::vector<at::Tensor>& tensors,
                                        const c10d::AllreduceOptions& options) {
  const at::Tensor whole = tensors[0].view({-1});
  const int64_t part = whole.numel() / num_local();
  c10d::ReduceScatterOptions scatter;
  scatter.reduceOp = options.reduceOp;
  scatter.timeout = options.timeout;
  c10d::AllgatherOptions gather;
  gather.timeout = options.timeout;
  c10d::AllreduceOptions outer = stage(options);
  if (options.reduceOp == c10d::ReduceOp::PREMUL_SUM) outer.reduceOp = c10d::ReduceOp::SUM;
  return run(c10d::OpType::ALLREDUCE, options.asyncOp, tensors, tensors, [&, this] {
    if (part > 0) {
      at::Tensor main = whole.narrow(0, 0, part * num_local());
      std::vector<at::Tensor> mine = {at::empty({part}, whole.options())};
      finish(setup_.local->_reduce_scatter_base(mine[0], main, stage(scatter)));
      finish(setup_.rail->allreduce(mine, outer));
      finish(setup_.local->_allgather_base(main, mine[0], stage(gather)));
    }
    std::vector<at::Tensor> rest = {
        whole.narrow(0, part * num_local(), whole.numel() - part * num_local())};
    if (rest[0].numel() > 0) finish(setup_.flat->allreduce(rest, stage(options)));
  });
}

Hierarchy::WorkPtr Hierarchy::alltoall_base(at::Tensor& output,
                                            at::Tensor& input,
                                            std::vector<int64_t>& output_splits,
                                            std::vector<int64_t>& input_splits,
                                            const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(output_splits.empty() && input_splits.empty(), "parts of different sizes");
  const int64_t count = input.numel() / size_;
  return run(c10d::OpType::ALLTOALL_BASE, options.asyncOp, {output, input}, {output}, [&, this] {
    const auto inner = stage(options);
    std::vector<int64_t> even;
    const auto exchange = [&](const BackendPtr& ranks, at::Tensor sent) {
      at::Tensor received = at::empty_like(sent);
      finish(ranks->alltoall_base(received, sent, even, even, inner));
      return received;
    };
    // By place there, then by node.
    const at::Tensor given = input.view({size_, count});
    std::vector<at::Tensor> parts;
    for (int place = 0; place < num_local(); ++place) {
      for (const std::vector<int>& node : ranks_) parts.push_back(given[node[place]]);
    }
    const at::Tensor here = exchange(setup_.local, at::cat(parts));
    // By node, then by who of this one gave it.
    const at::Tensor by_node =
        here.view({num_local(), num_nodes(), count}).transpose(0, 1).reshape({-1});
    const at::Tensor arrived = exchange(setup_.rail, by_node).view({size_, count});
    parts.resize(size_);
    for (int i = 0; i < size_; ++i) {
      parts[ranks_[i / num_local()][i % num_local()]] = arrived[i];
    }
    at::Tensor whole = output.view({-1});
    at::cat_out(whole, parts);
  });
}

void Hierarchy::setTimeout(std::chrono::milliseconds timeout) {
  setup_.local->setTimeout(timeout);
  setup_.rail->setTimeout(timeout);
}

c10d::ErrorType Hierarchy::getError() {
  for (const BackendPtr& part : {setup_.local, setup_.rail}) {
    const c10d::ErrorType error = part->getError();
    if (error != c10d::ErrorType::SUCCESS) return error;
  }
  return c10d::ErrorType::SUCCESS;
}

void Hierarchy::abort() {
  // Both, whatever the first one says: its peers may wait in the second.
  std::exception_ptr failure;
  for (const auto& backend : {setup_.local, setup_.rail}) {
    try {
      backend->abort();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void Hierarchy::shutdown() {
  without_gil([this] {
    setup_.local->shutdown();
    setup_.rail->shutdown();
  });
}

}  // namespace dpt::c10d_adapter
