// Requests of the core's own on the stock backend: how the tuner learns what gloo takes.
#include <ATen/ATen.h>

#include <algorithm>

#include "backend.hpp"

namespace dpt::c10d_adapter {
namespace {

// `parts` buffers of the request, which lie one behind the other, as one flat tensor.
at::Tensor wrap_parts(void* first, const dpt_request& request, int64_t parts) {
  return at::from_blob(first, {parts * static_cast<int64_t>(request.count)}, at::kFloat);
}

WorkPtr start_request(c10d::Backend& stock, const dpt_request& request) {
  const int size = stock.getSize();
  const Milliseconds timeout(request.timeout_ms);
  const bool is_root = stock.getRank() == request.root;
  const auto inputs = [&](int64_t parts) {
    return wrap_parts(const_cast<void*>(request.inputs[0]), request, parts);
  };
  const auto outputs = [&](int64_t parts) {
    return wrap_parts(request.outputs[0], request, parts);
  };
  switch (request.collective) {
    case DPT_ALL_REDUCE: {
      std::vector<at::Tensor> tensors = {outputs(1)};
      c10d::AllreduceOptions options;
      options.timeout = timeout;
      return stock.allreduce(tensors, options);
    }
    case DPT_REDUCE: {
      std::vector<at::Tensor> tensors = {outputs(1)};
      c10d::ReduceOptions options;
      options.rootRank = request.root;
      options.timeout = timeout;
      return stock.reduce(tensors, options);
    }
    case DPT_BROADCAST: {
      std::vector<at::Tensor> tensors = {outputs(1)};
      c10d::BroadcastOptions options;
      options.rootRank = request.root;
      options.timeout = timeout;
      return stock.broadcast(tensors, options);
    }
    case DPT_ALL_GATHER: {
      at::Tensor output = outputs(size);
      at::Tensor input = inputs(1);
      c10d::AllgatherOptions options;
      options.timeout = timeout;
      return stock._allgather_base(output, input, options);
    }
    case DPT_REDUCE_SCATTER: {
      at::Tensor output = outputs(1);
      at::Tensor input = inputs(size);
      c10d::ReduceScatterOptions options;
      options.timeout = timeout;
      return stock._reduce_scatter_base(output, input, options);
    }
    case DPT_GATHER: {
      std::vector<std::vector<at::Tensor>> all;
      if (is_root) all.push_back(outputs(size).chunk(size));
      std::vector<at::Tensor> one = {inputs(1)};
      c10d::GatherOptions options;
      options.rootRank = request.root;
      options.timeout = timeout;
      return stock.gather(all, one, options);
    }
    case DPT_SCATTER: {
      std::vector<std::vector<at::Tensor>> all;
      if (is_root) all.push_back(inputs(size).chunk(size));
      std::vector<at::Tensor> one = {outputs(1)};
      c10d::ScatterOptions options;
      options.rootRank = request.root;
      options.timeout = timeout;
      return stock.scatter(one, all, options);
    }
    default:
      throw std::invalid_argument("the tuner does not time this collective");
  }
}

void copy_message(const char* what, dpt_error* error) {
  const std::string text(what);
  error->message[text.copy(error->message, sizeof error->message - 1)] = '\0';
}

}  // namespace

dpt_status Backend::execute_on_delegate(void* context,
                                        const dpt_request* request,
                                        dpt_error* error) {
  try {
    if (request->dtype != DPT_FLOAT32 ||
        (request->reduce_op != DPT_SUM && request->reduce_op != DPT_NO_REDUCE)) {
      throw std::invalid_argument("the tuner times float32 and sums only");
    }
    const BackendPtr stock = static_cast<Backend*>(context)->delegate_for("cpu");
    start_request(*stock, *request)->wait();
    return DPT_OK;
  } catch (const std::exception& caught) {
    copy_message(caught.what(), error);
    return DPT_ERR_DELEGATE;
  }
}

}  // namespace dpt::c10d_adapter
