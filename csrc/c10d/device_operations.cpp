#include "device_operations.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "python_bridge.hpp"

namespace dpt::c10d_adapter {
namespace {

using Pointers = c10::SmallVector<void*, 8>;

// One pointer for each of `count` buffers: of as many tensors, or of one that holds them all.
Pointers pointers_of(at::TensorList tensors, size_t count) {
  Pointers pointers;
  for (const at::Tensor& tensor : tensors) pointers.push_back(tensor.data_ptr());
  if (tensors.size() == 1 && count > 1) {
    auto* const first = static_cast<char*>(pointers[0]);
    const size_t bytes = tensors[0].nbytes() / count;
    for (size_t i = 1; i < count; ++i) pointers.push_back(first + i * bytes);
  }
  return pointers;
}

// Says why only the stock backend can take these, or refuse them in its own words.
[[gnu::hot]] const char* why_not_plain(at::TensorList tensors,
                                       const at::Device& device,
                                       bool any_strides = false) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.device() != device) return "tensors on several devices";
    if (tensor.layout() != at::kStrided) return "sparse tensors";
    if (any_strides) continue;
    if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
      return "tensors that are not contiguous";
    }
  }
  return nullptr;
}

// Operations on lists. The other ranks don't know how one rank's list lies in memory, for example
// the root's of a gather. They have to choose as that rank does.
bool takes_lists(c10d::OpType op_type) {
  switch (op_type) {
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::REDUCE_SCATTER:
    case c10d::OpType::GATHER:
    case c10d::OpType::SCATTER:
    case c10d::OpType::ALLTOALL:
      return true;
    default:
      return false;
  }
}

}  // namespace

void* DeviceOperations::start_stream(void* call) {
  auto* const submitted = static_cast<Submitted*>(call);
  DeviceOperations& operations = *submitted->on_device;
  const at::Device device = submitted->device();
  if (const auto make = std::exchange(submitted->make_stand_ins, nullptr)) make();
  submitted->stream = operations.streams_.begin(device, submitted->call.asynchronous);
  return submitted->stream->native_handle();
}

int DeviceOperations::is_busy(void* call) {
  auto* const submitted = static_cast<Submitted*>(call);
  DeviceOperations& operations = *submitted->on_device;
  return operations.parts_.coalescing.is_open() ||
         operations.streams_.is_capturing(submitted->device());
}

[[gnu::hot]] bool DeviceOperations::describe_plain(const Call& call,
                                                   const at::Device& device,
                                                   dpt_request* request) const {
  if (call.uneven || call.not_native != nullptr) return false;
  if (why_not_plain(call.inputs, device) != nullptr) return false;
  if (!call.in_place && why_not_plain(call.outputs, device) != nullptr) return false;
  *request = call.describe();
  request->timeout_ms = parts_.setup.limit_of(call.timeout).count();
  request->on_device = 1;
  request->device = device.index();
  return true;
}

[[gnu::hot, gnu::flatten]] bool DeviceOperations::start_known(const Call& call,
                                                              const Replay& replay,
                                                              WorkPtr* work) {
  const at::Device device = call.device();
  dpt_request request;
  if (!describe_plain(call, device, &request)) return false;
  bool is_known = false;
  dpt_status status = DPT_OK;
  dpt_error error;
  uint64_t recorded = 0;
  std::exception_ptr failure;
  // Either may wait for a thread that waits for the GIL.
  without_gil([&]() __attribute__((hot, flatten)) {
    dpt_known begun;
    is_known = parts_.setup.api->begin_known(parts_.native.comm(), &request, &begun) != 0;
    if (!is_known) return;
    recorded = begun.recorded;
    try {
      *work = parts_.delegation.start_on_device(device, replay, begun.node_of, call.asynchronous);
      parts_.setup.api->record_end(begun.recorded, DPT_OK, /*on_stream=*/1);
    } catch (...) {
      failure = std::current_exception();
      error.message[0] = '\0';
      status = Delegation::describe_caught(device, &error);
      status = parts_.setup.api->fail_known(parts_.native.comm(), &request, &begun, status, &error);
    }
  });
  if (status != DPT_OK) parts_.native.throw_failure(status, failure, error);
  parts_.calling_lines.note(request, recorded);
  return is_known;
}

DeviceOperations::Places DeviceOperations::start_together(const at::Device& device,
                                                          const std::vector<dpt_request>& requests,
                                                          Together together,
                                                          WorkPtr* work) {
  std::vector<uint64_t> recorded(requests.size());
  std::vector<int> begun(requests.size());
  Places places;
  dpt_status status = DPT_OK;
  dpt_error error{};
  std::exception_ptr failure;
  without_gil([&] {
    status = parts_.setup.api->begin_coalesced(parts_.native.comm(),
                                               requests.data(),
                                               requests.size(),
                                               recorded.data(),
                                               begun.data(),
                                               &error);
    for (size_t i = 0; i < requests.size(); ++i) {
      if (begun[i] != 0) places.push_back(i);
    }
    if (places.empty()) return;
    try {
      const auto start = [&](c10d::Backend& stock) { return together(stock, places); };
      *work = parts_.delegation.start_on_device(
          device, replaying(start), nullptr, /*asynchronous=*/false);
    } catch (...) {
      failure = std::current_exception();
      status = Delegation::describe_caught(device, &error);
      const dpt_known first{recorded[places[0]], nullptr};
      status = parts_.setup.api->fail_known(
          parts_.native.comm(), &requests[places[0]], &first, status, &error);
    }
    for (const size_t place : places) parts_.setup.api->record_end(recorded[place], status, 1);
  });
  if (status != DPT_OK) parts_.native.throw_failure(status, failure, error);
  for (const size_t place : places) parts_.calling_lines.note(requests[place], recorded[place]);
  return places;
}

WorkPtr DeviceOperations::submit(Call&& what, const Replay& replay, uint64_t sequence) {
  // It need not outlive this call: the operation is then on its stream, or with the delegate.
  Submitted submitted(std::move(what), replay);
  submitted.on_device = this;
  const Call& call = submitted.call;
  const at::Device device = submitted.device();
  if (first_device_ < 0 && call.collective != DPT_BARRIER) first_device_ = device.index();

  const auto parts = static_cast<size_t>(parts_.setup.size);
  const bool takes_parts = call.collective == DPT_ALL_GATHER || call.collective == DPT_GATHER;
  const bool exchanges = call.collective == DPT_ALL_TO_ALL;
  const bool lists = takes_lists(call.op_type);
  const char* not_native = call.not_native;
  if (not_native == nullptr) not_native = why_not_plain(call.inputs, device, lists);
  if (not_native == nullptr && !call.in_place) {
    not_native = why_not_plain(call.outputs, device, lists);
  }
  Pointers inputs;
  Pointers outputs;
  std::optional<Contiguous> given;
  std::optional<Contiguous> taken;
  if (not_native == nullptr) {  // sparse ones, for one, have none
    inputs = pointers_of(call.inputs, call.gives_parts() || exchanges ? parts : 1);
    outputs = pointers_of(call.outputs, takes_parts || exchanges ? parts : 1);
    const bool gives_rows = why_not_plain(call.inputs, device) != nullptr;
    const bool takes_rows = !call.in_place && why_not_plain(call.outputs, device) != nullptr;
    // Calls that the stock backend carries out need none. The request has these arrays' addresses.
    if (gives_rows || takes_rows) {
      submitted.make_stand_ins = [&, gives_rows, takes_rows] {
        if (gives_rows) given.emplace(call.inputs, Contiguous::Direction::kInput);
        if (takes_rows) taken.emplace(call.outputs, Contiguous::Direction::kOutput);
        if (given) std::ranges::copy(given->pointers(), inputs.begin());
        if (taken) std::ranges::copy(taken->pointers(), outputs.begin());
      };
    }
  }
  dpt_request request = submitted.describe(parts_.setup.limit_of(call.timeout));
  request.inputs = inputs.data();
  request.outputs = outputs.data();
  request.not_native = not_native;
  request.on_device = 1;
  request.device = device.index();
  request.stream = start_stream;
  request.busy = is_busy;
  dpt_outcome outcome = DPT_COMPLETED;
  parts_.native.submit(request, submitted.failure, nullptr, &outcome);
  parts_.calling_lines.note(request, submitted.recorded);
  if (outcome == DPT_DELEGATED) {
    return parts_.coalescing.note(parts_.delegation.watched(submitted), call);
  }
  call.note_written();
  std::exception_ptr failure;
  if (taken) {
    const c10::StreamGuard behind(*submitted.stream);
    try {
      taken->copy_back();
    } catch (...) {
      failure = std::current_exception();  // as of outputs that overlap themselves
    }
  }
  streams_.end(*submitted.stream);
  std::vector<at::Tensor> tensors = call.inputs.vec();
  if (!call.in_place) tensors.insert(tensors.end(), call.outputs.begin(), call.outputs.end());
  for (const auto* const each : {&given, &taken}) {
    if (!*each) continue;
    const at::TensorList used = (*each)->tensors();
    tensors.insert(tensors.end(), used.begin(), used.end());
  }
  auto work = c10::make_intrusive<DeviceWork>(parts_.setup.rank,
                                              call.op_type,
                                              parts_.setup.profiled_as(call.title, at::kCUDA),
                                              sequence,
                                              call.results.vec());
  work->started(*submitted.stream, std::move(tensors));
  if (failure) std::rethrow_exception(failure);  // the work holds back what is in use
  return parts_.coalescing.note(std::move(work), call);
}

}  // namespace dpt::c10d_adapter
