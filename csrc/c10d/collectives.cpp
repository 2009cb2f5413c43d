// c10d's entry points: each checks its arguments and builds one Call. c10d's spellings end here.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <regex>

#include "backend.hpp"
#include "convert.hpp"

namespace dpt::c10d_adapter {
namespace {

[[gnu::hot]] void check_single(const char* op, const std::vector<at::Tensor>& tensors) {
  DPT_CHECK_VALUE(tensors.size() == 1,
                  {op, " takes one tensor per rank, got ", std::to_string(tensors.size())});
}

void check_same(const char* op, const std::vector<at::Tensor>& tensors, const at::Tensor& like) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    DPT_CHECK_VALUE(
        tensors[i].numel() == like.numel() && tensors[i].scalar_type() == like.scalar_type(),
        {op,
         ": tensor ",
         std::to_string(i),
         " of the list is ",
         std::to_string(tensors[i].numel()),
         " x ",
         c10::toString(tensors[i].scalar_type()),
         ", this rank's own is ",
         std::to_string(like.numel()),
         " x ",
         c10::toString(like.scalar_type())});
  }
}

bool differ_in_size(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() != tensors[0].numel()) return true;
  }
  return false;
}

void check_dtypes(const char* op, const std::vector<at::Tensor>& tensors, const at::Tensor& like) {
  for (const at::Tensor& tensor : tensors) {
    DPT_CHECK_VALUE(tensor.scalar_type() == like.scalar_type(),
                    {op,
                     ": the tensors differ in dtype: ",
                     c10::toString(tensor.scalar_type()),
                     " and ",
                     c10::toString(like.scalar_type())});
  }
}

// A contiguous tensor cut along its first dimension without copying. Without `splits` the parts are
// equal.
std::vector<at::Tensor> rows_of(const char* which,
                                const at::Tensor& whole,
                                const std::vector<int64_t>& splits,
                                int size) {
  DPT_CHECK_VALUE(whole.dim() > 0,
                  {"all_to_all: the ", which, " tensor has no dimension to split"});
  const int64_t rows = whole.size(0);
  int64_t total = 0;
  for (const int64_t split : splits) total += split;
  if (splits.empty()) {
    DPT_CHECK_VALUE(rows % size == 0,
                    {"all_to_all: the ",
                     which,
                     " tensor's ",
                     std::to_string(rows),
                     " rows can't be split evenly over ",
                     std::to_string(size),
                     " ranks"});
  } else {
    DPT_CHECK_VALUE(splits.size() == static_cast<size_t>(size) && total == rows,
                    {"all_to_all: the ",
                     std::to_string(splits.size()),
                     " splits of the ",
                     which,
                     " tensor add up to ",
                     std::to_string(total),
                     "; ",
                     std::to_string(size),
                     " ranks and ",
                     std::to_string(rows),
                     " rows are needed"});
  }
  std::vector<at::Tensor> parts;
  parts.reserve(size);
  int64_t begin = 0;
  for (int rank = 0; rank < size; ++rank) {
    const int64_t length = splits.empty() ? rows / size : splits[rank];
    parts.push_back(whole.narrow(0, begin, length));
    begin += length;
  }
  return parts;
}

// `whole` as `size` equal parts without copying; it must be contiguous. Off the host it stays in
// one piece, of any layout: the stock backend takes it as it is, and there each view is time that
// shows.
using Parts = c10::SmallVector<at::Tensor, 1>;
[[gnu::hot]] Parts parts_of(const char* op,
                            const at::Tensor& whole,
                            const at::Tensor& part,
                            int size) {
  DPT_CHECK_VALUE(whole.scalar_type() == part.scalar_type(),
                  {op,
                   ": the tensors differ in dtype: ",
                   c10::toString(whole.scalar_type()),
                   " and ",
                   c10::toString(part.scalar_type())});
  DPT_CHECK_VALUE(whole.numel() == part.numel() * size,
                  {op,
                   ": the large tensor has ",
                   std::to_string(whole.numel()),
                   " elements; ",
                   std::to_string(size),
                   " ranks of ",
                   std::to_string(part.numel()),
                   " need ",
                   std::to_string(part.numel() * size)});
  if (!whole.device().is_cpu()) return {whole};
  const at::Tensor flat = whole.view({-1});
  Parts parts;
  parts.reserve(size);
  for (int rank = 0; rank < size; ++rank) {
    parts.push_back(flat.narrow(0, rank * part.numel(), part.numel()));
  }
  return parts;
}

std::vector<at::Tensor> flatten(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<at::Tensor> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// NCCL's mean of whole numbers is their sum, divided towards zero. Programs ask every group for it
// that isn't called "gloo" (Lightning's metrics do). Makes a sum of `op` and gives what is then to
// be done with the result; nothing where that is not needed.
[[gnu::hot]] std::function<void()> integer_mean(c10d::ReduceOp* op,
                                                const at::Tensor& result,
                                                int size) {
  if (!is_integer_mean(*op, result)) return nullptr;
  *op = c10d::ReduceOp(c10d::ReduceOp::SUM);
  return [result, size] {
    // The thread that gets here may not be the one in whose inference mode the tensor was made.
    const c10::InferenceMode as_made(result.is_inference());
    result.div_(size, "trunc");
  };
}

// The stock backend's work, with what is to be done with `result` once it has ended. That can't be
// given on, as some of gloo's copy the result again each time they are waited for.
[[gnu::hot]] WorkPtr followed_by(const std::function<void()>& after,
                                 WorkPtr work,
                                 const at::Tensor& result) {
  if (!after) return work;
  work->wait();
  after();
  return c10::make_intrusive<JoinedWork>(
      /*rank=*/-1, c10d::OpType::UNKNOWN, std::vector<WorkPtr>{}, std::vector<at::Tensor>{result});
}

// The list of a gather's outputs or a scatter's inputs, which the root alone has.
void check_parts(const char* op, bool is_root, size_t found, int size) {
  DPT_CHECK_VALUE(found == (is_root ? static_cast<size_t>(size) : 0),
                  {op,
                   is_root ? " needs one tensor per rank on its root ("
                           : " takes a list of tensors on its root only (here none instead of ",
                   is_root ? std::to_string(size) + "), got " : "",
                   std::to_string(found),
                   is_root ? "" : ")"});
}

// A first monitored barrier meets the other ranks to make gloo's part. Who does not come is told in
// the words of gloo, which programs look for; empty: that is not what went wrong.
std::string failed_monitored_barrier(const std::string& text, Milliseconds limit, int rank) {
  static const std::regex missing("rank\\(s\\) ([0-9]+)[0-9, ]* did not join");
  std::smatch found;
  if (!std::regex_search(text, found, missing)) return "";
  const std::string own = "Rank " + std::to_string(rank);
  const std::string within = std::to_string(limit.count()) + " ms: " + text;
  if (rank != 0) {
    return own +
           " successfully reached monitoredBarrier, but received errors while waiting: " + text;
  }
  if (limit.count() == 0) return own + " timed out in monitoredBarrier after " + within;
  return "Rank " + found[1].str() + " failed to pass monitoredBarrier in " + within;
}

}  // namespace

[[gnu::hot]] WorkPtr Backend::allreduce(std::vector<at::Tensor>& tensors,
                                        const c10d::AllreduceOptions& asked) {
  check_single("all_reduce", tensors);
  c10d::AllreduceOptions options = asked;
  const auto after = integer_mean(&options.reduceOp, tensors[0], size_);
  return submit({.collective = DPT_ALL_REDUCE,
                 .op_type = c10d::OpType::ALLREDUCE,
                 .title = "all_reduce",
                 .timeout = options.timeout,
                 .asynchronous = options.asyncOp,
                 .inputs = tensors,
                 .outputs = tensors,
                 .in_place = true,
                 .reduce_op = asked.reduceOp,
                 .core_reduce_op = to_reduce_op(options.reduceOp),
                 .after = after},
                replaying(
                    [](c10d::Backend& stock, auto& tensors, auto& options, auto& after) {
                      return followed_by(after, stock.allreduce(tensors, options), tensors[0]);
                    },
                    tensors,
                    options,
                    after));
}

WorkPtr Backend::allreduce_sparse(std::vector<at::Tensor>& tensors,
                                  const c10d::AllreduceOptions& options) {
  return submit({.collective = DPT_ALL_REDUCE,
                 .op_type = c10d::OpType::UNKNOWN,
                 .title = "sparse_all_reduce",
                 .inputs = tensors,
                 .in_place = true},
                replaying(
                    [](c10d::Backend& stock, auto& tensors, auto& options) {
                      return stock.allreduce_sparse(tensors, options);
                    },
                    tensors,
                    options));
}

WorkPtr Backend::broadcast(std::vector<at::Tensor>& tensors,
                           const c10d::BroadcastOptions& options) {
  check_single("broadcast", tensors);
  check_root("broadcast", options.rootRank);
  return submit({.collective = DPT_BROADCAST,
                 .op_type = c10d::OpType::BROADCAST,
                 .title = "broadcast",
                 .timeout = options.timeout,
                 .asynchronous = options.asyncOp,
                 .inputs = tensors,
                 .outputs = tensors,
                 .in_place = true,
                 .root = static_cast<int>(options.rootRank)},
                replaying(
                    [](c10d::Backend& stock, auto& tensors, auto& options) {
                      return stock.broadcast(tensors, options);
                    },
                    tensors,
                    options));
}

WorkPtr Backend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                           std::vector<at::Tensor>& inputs,
                           const c10d::AllgatherOptions& options) {
  check_single("all_gather", inputs);
  DPT_CHECK_VALUE(outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(size_),
                  {"all_gather needs one output per rank (",
                   std::to_string(size_),
                   "), got ",
                   std::to_string(outputs.empty() ? 0 : outputs[0].size())});
  check_dtypes("all_gather", outputs[0], inputs[0]);
  check_same("all_gather", {outputs[0][rank_]}, inputs[0]);
  return submit({.collective = DPT_ALL_GATHER,
                 .op_type = c10d::OpType::ALLGATHER,
                 .title = "all_gather",
                 .timeout = options.timeout,
                 .asynchronous = options.asyncOp,
                 .inputs = inputs,
                 .outputs = outputs[0],
                 .uneven = differ_in_size(outputs[0])},
                replaying(
                    [](c10d::Backend& stock, auto& outputs, auto& inputs, auto& options) {
                      return stock.allgather(outputs, inputs, options);
                    },
                    outputs,
                    inputs,
                    options));
}

[[gnu::hot]] WorkPtr Backend::_allgather_base(at::Tensor& output,
                                              at::Tensor& input,
                                              const c10d::AllgatherOptions& options) {
  // A strided output cannot be cut into views: gather into a contiguous one and copy back.
  const bool copied = output.device().is_cpu() && !output.is_contiguous();
  const at::Tensor whole = copied ? at::empty(output.sizes(), output.options()) : output;
  return submit(
      {.collective = DPT_ALL_GATHER,
       .op_type = c10d::OpType::_ALLGATHER_BASE,
       .title = "all_gather",
       .timeout = options.timeout,
       .asynchronous = options.asyncOp,
       .inputs = {input},
       .outputs = parts_of("all_gather", whole, input, size_),
       .results = {output},
       .after = copied ? std::function<void()>([output, whole] { copy_as_made(output, whole); })
                       : nullptr},
      replaying(
          [](c10d::Backend& stock, auto& output, auto& input, auto& options) {
            return stock._allgather_base(output, input, options);
          },
          output,
          input,
          options));
}

WorkPtr Backend::reduce_scatter(std::vector<at::Tensor>& outputs,
                                std::vector<std::vector<at::Tensor>>& inputs,
                                const c10d::ReduceScatterOptions& asked) {
  check_single("reduce_scatter", outputs);
  DPT_CHECK_VALUE(inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(size_),
                  {"reduce_scatter needs one input per rank (",
                   std::to_string(size_),
                   "), got ",
                   std::to_string(inputs.empty() ? 0 : inputs[0].size())});
  const bool uneven = differ_in_size(inputs[0]);
  check_dtypes("reduce_scatter", inputs[0], outputs[0]);
  check_same(
      "reduce_scatter", uneven ? std::vector<at::Tensor>{inputs[0][rank_]} : inputs[0], outputs[0]);
  c10d::ReduceScatterOptions options = asked;
  const auto after = integer_mean(&options.reduceOp, outputs[0], size_);
  return submit(
      {.collective = DPT_REDUCE_SCATTER,
       .op_type = c10d::OpType::REDUCE_SCATTER,
       .title = "reduce_scatter",
       .timeout = options.timeout,
       .asynchronous = options.asyncOp,
       .inputs = inputs[0],
       .outputs = outputs,
       .not_native = uneven ? "parts of different sizes" : nullptr,
       .reduce_op = asked.reduceOp,
       .core_reduce_op = to_reduce_op(options.reduceOp),
       .after = after},
      replaying(
          [](c10d::Backend& stock, auto& outputs, auto& inputs, auto& options, auto& after) {
            return followed_by(after, stock.reduce_scatter(outputs, inputs, options), outputs[0]);
          },
          outputs,
          inputs,
          options,
          after));
}

[[gnu::hot]] WorkPtr Backend::_reduce_scatter_base(at::Tensor& output,
                                                   at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& asked) {
  c10d::ReduceScatterOptions options = asked;
  const auto after = integer_mean(&options.reduceOp, output, size_);
  const at::Tensor whole = input.device().is_cpu() ? input.contiguous() : input;
  return submit(
      {.collective = DPT_REDUCE_SCATTER,
       .op_type = c10d::OpType::_REDUCE_SCATTER_BASE,
       .title = "reduce_scatter",
       .timeout = options.timeout,
       .asynchronous = options.asyncOp,
       .inputs = parts_of("reduce_scatter", whole, output, size_),
       .outputs = {output},
       .reduce_op = asked.reduceOp,
       .core_reduce_op = to_reduce_op(options.reduceOp),
       .shown = input,
       .after = after},
      replaying(
          [](c10d::Backend& stock, auto& output, auto& input, auto& options, auto& after) {
            return followed_by(after, stock._reduce_scatter_base(output, input, options), output);
          },
          output,
          input,
          options,
          after));
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& asked) {
  c10d::BarrierOptions options = asked;
  at::Device device = options.device.value_or(barrier_device_);
  // NCCL takes the device that its group is bound to or used first, and guesses one by the rank
  // where there is neither. The delegate isn't told of the one, and native operations don't use it.
  if (device.is_cuda() && options.device_ids.empty()) {
    const std::optional<at::Device> bound = getBoundDeviceId();
    const c10::DeviceIndex index = bound ? bound->index() : submission_.first_device();
    if (index >= 0) options.device_ids = {index};
  }
  std::vector<at::Tensor> nothing;
  if (!device.is_cpu()) {
    if (!options.device_ids.empty()) device.set_index(options.device_ids[0]);
    nothing = {at::empty({0}, at::TensorOptions(device).dtype(at::kByte))};
  }
  return submit(
      {.collective = DPT_BARRIER,
       .op_type = c10d::OpType::BARRIER,
       .title = "barrier",
       .timeout = options.timeout,
       .asynchronous = options.asyncOp,
       .inputs = nothing,
       .in_place = !nothing.empty()},
      replaying([](c10d::Backend& stock, auto& options) { return stock.barrier(options); },
                options));
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const auto replay = replaying(
      [](c10d::Backend& stock, auto& options, auto& wait_all_ranks) {
        stock.monitoredBarrier(options, wait_all_ranks);
        return WorkPtr();
      },
      options,
      wait_all_ranks);
  try {
    submission_.run_on_delegate({.collective = DPT_BARRIER,
                                 .op_type = c10d::OpType::BARRIER,
                                 .title = "deepytorch:barrier",
                                 .timeout = options.timeout,
                                 .asynchronous = false},
                                replay,
                                "monitored");
  } catch (const std::exception& error) {
    const Milliseconds limit = setup_.limit_of(options.timeout);
    const std::string words = failed_monitored_barrier(text_of(error), limit, rank_);
    if (words.empty()) throw;
    C10_THROW_ERROR(DistBackendError, words);
  }
}

WorkPtr Backend::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& asked) {
  check_single("reduce", tensors);
  check_root("reduce", asked.rootRank);
  c10d::ReduceOptions options = asked;
  auto after = integer_mean(&options.reduceOp, tensors[0], size_);
  if (rank_ != options.rootRank) after = nullptr;
  return submit({.collective = DPT_REDUCE,
                 .op_type = c10d::OpType::REDUCE,
                 .title = "reduce",
                 .timeout = options.timeout,
                 .asynchronous = options.asyncOp,
                 .inputs = tensors,
                 .outputs = tensors,
                 .in_place = true,
                 .reduce_op = asked.reduceOp,
                 .core_reduce_op = to_reduce_op(options.reduceOp),
                 .root = static_cast<int>(options.rootRank),
                 .after = after},
                replaying(
                    [](c10d::Backend& stock, auto& tensors, auto& options, auto& after) {
                      return followed_by(after, stock.reduce(tensors, options), tensors[0]);
                    },
                    tensors,
                    options,
                    after));
}

WorkPtr Backend::gather(std::vector<std::vector<at::Tensor>>& outputs,
                        std::vector<at::Tensor>& inputs,
                        const c10d::GatherOptions& options) {
  check_single("gather", inputs);
  check_root("gather", options.rootRank);
  const bool is_root = rank_ == options.rootRank;
  const std::vector<at::Tensor> parts = flatten(outputs);
  check_parts("gather", is_root, parts.size(), size_);
  check_same("gather", parts, inputs[0]);
  return submit({.collective = DPT_GATHER,
                 .op_type = c10d::OpType::GATHER,
                 .title = "gather",
                 .timeout = options.timeout,
                 .asynchronous = options.asyncOp,
                 .inputs = inputs,
                 .outputs = parts,
                 .root = static_cast<int>(options.rootRank)},
                replaying(
                    [](c10d::Backend& stock, auto& outputs, auto& inputs, auto& options) {
                      return stock.gather(outputs, inputs, options);
                    },
                    outputs,
                    inputs,
                    options));
}

WorkPtr Backend::scatter(std::vector<at::Tensor>& outputs,
                         std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ScatterOptions& options) {
  check_single("scatter", outputs);
  check_root("scatter", options.rootRank);
  const bool is_root = rank_ == options.rootRank;
  const std::vector<at::Tensor> parts = flatten(inputs);
  check_parts("scatter", is_root, parts.size(), size_);
  check_same("scatter", parts, outputs[0]);
  return submit({.collective = DPT_SCATTER,
                 .op_type = c10d::OpType::SCATTER,
                 .title = "scatter",
                 .timeout = options.timeout,
                 .asynchronous = options.asyncOp,
                 .inputs = parts,
                 .outputs = outputs,
                 .root = static_cast<int>(options.rootRank)},
                replaying(
                    [](c10d::Backend& stock, auto& outputs, auto& inputs, auto& options) {
                      return stock.scatter(outputs, inputs, options);
                    },
                    outputs,
                    inputs,
                    options));
}

WorkPtr Backend::alltoall_base(at::Tensor& output,
                               at::Tensor& input,
                               std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits,
                               const c10d::AllToAllOptions& options) {
  check_dtypes("all_to_all", {output}, input);
  // Gloo and NCCL refuse it in these words.
  DPT_CHECK_VALUE(input.is_contiguous(), {"Tensors must be contiguous: the input of all_to_all"});
  // A strided output cannot be cut into contiguous rows: write into a stand-in and copy back. Off
  // the host nobody would copy it back, and the stock backend has to refuse it.
  const bool copied = output.device().is_cpu() && !output.is_contiguous();
  const at::Tensor whole = copied ? at::empty(output.sizes(), output.options()) : output;
  return submit(
      {.collective = DPT_ALL_TO_ALL,
       .op_type = c10d::OpType::ALLTOALL_BASE,
       .title = "all_to_all",
       .timeout = options.timeout,
       .asynchronous = options.asyncOp,
       .inputs = rows_of("input", input, input_splits, size_),
       .outputs = rows_of("output", whole, output_splits, size_),
       .uneven = !input_splits.empty() || !output_splits.empty(),
       .results = {output},
       .shown = input,
       .after = copied ? std::function<void()>([output, whole] { copy_as_made(output, whole); })
                       : nullptr},
      replaying(
          [](c10d::Backend& stock,
             auto& output,
             auto& input,
             auto& output_splits,
             auto& input_splits,
             auto& options) {
            return stock.alltoall_base(output, input, output_splits, input_splits, options);
          },
          output,
          input,
          output_splits,
          input_splits,
          options));
}

WorkPtr Backend::alltoall(std::vector<at::Tensor>& outputs,
                          std::vector<at::Tensor>& inputs,
                          const c10d::AllToAllOptions& options) {
  const auto ranks = static_cast<size_t>(size_);
  DPT_CHECK_VALUE(inputs.size() == ranks && outputs.size() == ranks,
                  {"all_to_all needs one input and one output per rank (",
                   std::to_string(size_),
                   "), got ",
                   std::to_string(inputs.size()),
                   " and ",
                   std::to_string(outputs.size())});
  check_dtypes("all_to_all", inputs, inputs[0]);
  check_dtypes("all_to_all", outputs, inputs[0]);
  return submit({.collective = DPT_ALL_TO_ALL,
                 .op_type = c10d::OpType::ALLTOALL,
                 .title = "all_to_all",
                 .timeout = options.timeout,
                 .asynchronous = options.asyncOp,
                 .inputs = inputs,
                 .outputs = outputs,
                 .uneven = true},
                replaying(
                    [](c10d::Backend& stock, auto& outputs, auto& inputs, auto& options) {
                      return stock.alltoall(outputs, inputs, options);
                    },
                    outputs,
                    inputs,
                    options));
}

}  // namespace dpt::c10d_adapter
