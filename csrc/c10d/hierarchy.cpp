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

// A stage that is waited for at once may run where its caller is.
template <typename Options>
Options stage(Options options) {
  options.asyncOp = false;
  return options;
}

// One that the network carries while others go on within the node.
template <typename Options>
Options beside(Options options) {
  options.asyncOp = true;
  return options;
}

constexpr int64_t kMostPieces = 4;
constexpr int64_t kGranularity = 128;  // elements: pieces are aligned where the whole is

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
    if (rank == rank_) node_ = static_cast<int>(node);
    ranks_[node].push_back(rank);
  }
  for (const std::vector<int>& node : ranks_) {
    TORCH_CHECK_VALUE(node.size() == ranks_[0].size(), "nodes with different numbers of ranks");
  }
}

bool Hierarchy::is_one_piece(int node) const {
  return ranks_[node].back() - ranks_[node].front() == num_local() - 1;
}

std::vector<Hierarchy::Piece> Hierarchy::pieces_of(int64_t count, size_t element_bytes) const {
  const auto fitting = static_cast<int64_t>(count * element_bytes / setup_.piece_bytes);
  const int64_t number = std::clamp<int64_t>(fitting, 1, kMostPieces);
  const int64_t even = (count + number - 1) / number;
  const int64_t length = (even + kGranularity - 1) / kGranularity * kGranularity;
  std::vector<Piece> pieces;
  for (int64_t begin = 0; begin < count; begin += length) {
    pieces.push_back({begin, std::min(length, count - begin)});
  }
  return pieces;
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
  const at::Tensor mine = input.reshape({-1});
  at::Tensor of_nodes = at::empty({num_nodes(), mine.numel()}, mine.options());
  at::Tensor rails = of_nodes.view({-1});
  at::Tensor part = mine;
  const WorkPtr exchange = setup_.rail->_allgather_base(rails, part, beside(options));
  const at::Tensor all = output.view({size_, mine.numel()});
  const auto gather = [&](int node, at::Tensor from) {
    const auto inner = stage(options);
    if (is_one_piece(node)) {
      at::Tensor to = all.narrow(0, ranks_[node][0], num_local()).view({-1});
      finish(setup_.local->_allgather_base(to, from, inner));
      return;
    }
    at::Tensor to = at::empty({num_local() * mine.numel()}, mine.options());
    finish(setup_.local->_allgather_base(to, from, inner));
    for (int i = 0; i < num_local(); ++i) {
      const at::Tensor place = all[ranks_[node][i]];
      if (place.data_ptr() == mine.data_ptr()) continue;  // in place, and the rails may read it yet
      place.copy_(to.view({num_local(), -1})[i]);
    }
  };
  gather(node_, mine);
  finish(exchange);
  for (int node = 0; node < num_nodes(); ++node) {
    if (node != node_) gather(node, of_nodes[node]);
  }
}

void Hierarchy::reduce_in_stages(const at::Tensor& output,
                                 const at::Tensor& input,
                                 const c10d::ReduceScatterOptions& options) {
  const auto inner = stage(options);
  auto outer = beside(options);
  // Factors are applied once.
  if (options.reduceOp == c10d::ReduceOp::PREMUL_SUM) outer.reduceOp = c10d::ReduceOp::SUM;
  const at::Tensor all = input.view({size_, output.numel()});
  const at::Tensor whole = output.view({-1});
  std::vector<at::Tensor> sent;  // until the rails have carried it
  std::vector<WorkPtr> exchanges;
  for (const auto [begin, length] : pieces_of(output.numel(), output.element_size())) {
    const at::Tensor given = all.narrow(1, begin, length);
    const at::Tensor& of_nodes =
        sent.emplace_back(at::empty({num_nodes(), length}, output.options()));
    for (int node = 0; node < num_nodes(); ++node) {
      at::Tensor from;
      if (is_one_piece(node)) {  // copied only where not the whole of each part goes
        from = given.narrow(0, ranks_[node][0], num_local()).reshape({-1});
      } else {
        std::vector<at::Tensor> parts;
        for (const int rank : ranks_[node]) parts.push_back(given[rank]);
        from = at::cat(parts);
      }
      at::Tensor to = of_nodes[node];
      finish(setup_.local->_reduce_scatter_base(to, from, inner));
    }
    at::Tensor rails = of_nodes.view({-1});
    at::Tensor to = whole.narrow(0, begin, length);
    exchanges.push_back(setup_.rail->_reduce_scatter_base(to, rails, outer));
  }
  for (const WorkPtr& exchange : exchanges) finish(exchange);
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
  c10d::AllreduceOptions outer = beside(options);
  if (options.reduceOp == c10d::ReduceOp::PREMUL_SUM) outer.reduceOp = c10d::ReduceOp::SUM;
  return run(c10d::OpType::ALLREDUCE, options.asyncOp, tensors, tensors, [&, this] {
    const std::vector<Piece> pieces = pieces_of(part, whole.element_size());
    const auto main = [&](const Piece& piece) {
      return whole.narrow(0, piece.begin * num_local(), piece.length * num_local());
    };
    std::vector<at::Tensor> mine;
    std::vector<WorkPtr> exchanges;
    for (const Piece& piece : pieces) {
      at::Tensor from = main(piece);
      mine.push_back(at::empty({piece.length}, whole.options()));
      finish(setup_.local->_reduce_scatter_base(mine.back(), from, stage(scatter)));
      std::vector<at::Tensor> rail = {mine.back()};
      exchanges.push_back(setup_.rail->allreduce(rail, outer));
    }
    for (size_t i = 0; i < pieces.size(); ++i) {
      finish(exchanges[i]);
      at::Tensor to = main(pieces[i]);
      finish(setup_.local->_allgather_base(to, mine[i], stage(gather)));
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
