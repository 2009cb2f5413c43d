// Carries out the core's own requests on the stock backend. By them the tuner learns how long gloo
// and NCCL take, and NCCL gets its part of what is divided.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "convert.hpp"
#include "delegation.hpp"

namespace dpt::c10d_adapter {
namespace {

// `parts` buffers of the request, which lie one behind the other, as one flat tensor.
at::Tensor wrap_parts(void* first, const dpt_request& request, int64_t parts) {
  const at::ScalarType type = to_scalar_type(request.dtype);
  const auto device = request.on_device != 0
                          ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(request.device))
                          : at::Device(at::kCPU);
  // Told the device, it asks nobody whose memory this is.
  return at::for_blob(first, {parts * static_cast<int64_t>(request.count)})
      .options(at::device(device).dtype(type))
      .target_device(device)
      .make_tensor();
}

// Options as a program that waits for the operation gives them. On a device it then runs on the
// caller's own stream, which is as fast as the stock backend can be.
template <typename Options>
Options options_for(const dpt_request& request) {
  Options options;
  options.timeout = Milliseconds(request.timeout_ms);
  options.asyncOp = request.on_device == 0;
  return options;
}

WorkPtr start_request(c10d::Backend& stock, const dpt_request& request) {
  const int size = stock.getSize();
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
      auto options = options_for<c10d::AllreduceOptions>(request);
      if (request.reduce_op == DPT_AVG) options.reduceOp = c10d::ReduceOp::AVG;
      return stock.allreduce(tensors, options);
    }
    case DPT_REDUCE: {
      std::vector<at::Tensor> tensors = {outputs(1)};
      auto options = options_for<c10d::ReduceOptions>(request);
      options.rootRank = request.root;
      return stock.reduce(tensors, options);
    }
    case DPT_BROADCAST: {
      std::vector<at::Tensor> tensors = {outputs(1)};
      auto options = options_for<c10d::BroadcastOptions>(request);
      options.rootRank = request.root;
      return stock.broadcast(tensors, options);
    }
    case DPT_ALL_GATHER: {
      at::Tensor output = outputs(size);
      at::Tensor input = inputs(1);
      auto options = options_for<c10d::AllgatherOptions>(request);
      return stock._allgather_base(output, input, options);
    }
    case DPT_REDUCE_SCATTER: {
      at::Tensor output = outputs(1);
      at::Tensor input = inputs(size);
      auto options = options_for<c10d::ReduceScatterOptions>(request);
      return stock._reduce_scatter_base(output, input, options);
    }
    case DPT_GATHER: {
      std::vector<std::vector<at::Tensor>> all;
      if (is_root) all.push_back(outputs(size).chunk(size));
      std::vector<at::Tensor> one = {inputs(1)};
      auto options = options_for<c10d::GatherOptions>(request);
      options.rootRank = request.root;
      return stock.gather(all, one, options);
    }
    case DPT_SCATTER: {
      std::vector<std::vector<at::Tensor>> all;
      if (is_root) all.push_back(inputs(size).chunk(size));
      std::vector<at::Tensor> one = {outputs(1)};
      auto options = options_for<c10d::ScatterOptions>(request);
      options.rootRank = request.root;
      return stock.scatter(one, all, options);
    }
    case DPT_ALL_TO_ALL: {
      at::Tensor output = outputs(size);
      at::Tensor input = inputs(size);
      std::vector<int64_t> even;
      auto options = options_for<c10d::AllToAllOptions>(request);
      return stock.alltoall_base(output, input, even, even, options);
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

// Failures of NCCL or the device may be this rank's alone. Any other, for arguments that are
// refused say, is so on every rank.
[[gnu::cold, gnu::noinline]] dpt_status Delegation::describe_caught(const at::Device& device,
                                                                    dpt_error* error) {
  const auto broke = [&](const std::exception& caught) {
    copy_message(caught.what(), error);
    return device.is_cuda() ? DPT_ERR_DELEGATE_BROKE : DPT_ERR_DELEGATE;
  };
  try {
    throw;
  } catch (const c10::DistError& caught) {
    return broke(caught);
  } catch (const c10::OutOfMemoryError& caught) {
    return broke(caught);
  } catch (const c10::AcceleratorError& caught) {
    return broke(caught);
  } catch (const std::exception& caught) {
    copy_message(caught.what(), error);
  } catch (...) {
    copy_message("an exception of an unknown type", error);
  }
  return DPT_ERR_DELEGATE;
}

dpt_status Delegation::execute(void* context, const dpt_request* request, dpt_error* error) {
  const bool on_device = request->on_device != 0;
  const at::Device device(on_device ? at::kCUDA : at::kCPU);
  try {
    const bool sums = request->reduce_op == DPT_SUM || request->reduce_op == DPT_NO_REDUCE;
    const bool averages = request->reduce_op == DPT_AVG && request->collective == DPT_ALL_REDUCE;
    if (!sums && !averages) {
      throw std::invalid_argument("the core asks for sums and averages, and nothing else");
    }
    Delegation& delegation = *static_cast<Delegation*>(context);
    if (!on_device) {
      start_request(*delegation.delegates_.of(at::kCPU), *request)->wait();
      return DPT_OK;
    }
    const c10::Stream& stream = *static_cast<Submitted*>(request->call)->stream;
    const DelegatedStream::Call starting(delegation.stream_, stream);
    const int* const node_of = request->node_of;
    const BackendPtr stock = node_of != nullptr ? delegation.delegates_.by_nodes("cuda", node_of)
                                                : delegation.delegates_.of(at::kCUDA);
    const c10::StreamGuard guard(stream);
    const WorkPtr work = start_request(*stock, *request);
    // The stream waits for it, not this thread. What ran on that stream itself has no work.
    if (work) work->synchronize();
    return DPT_OK;
  } catch (...) {
    // With a part of the program's own operation, this is what the program gets.
    if (on_device) static_cast<Submitted*>(request->call)->failure = std::current_exception();
    return describe_caught(device, error);
  }
}

}  // namespace dpt::c10d_adapter
