#include "device.hpp"

#include <ATen/core/List.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

#include "python_bridge.hpp"

namespace dpt::c10d_adapter {
namespace {

constexpr std::chrono::microseconds kPoll{50};

c10::impl::VirtualGuardImpl guard_of(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

c10::Event event_on(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

}  // namespace

c10::Stream DeviceStreams::begin(const c10::Device& device, bool asynchronous) {
  const c10::impl::VirtualGuardImpl guard = guard_of(device);
  const c10::Stream current = guard.getStream(device);
  if (asynchronous && !own_) own_ = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  const c10::Stream stream = asynchronous ? *own_ : current;
  if (stream != current) event_on(current).block(stream);
  if (can_follow_last(stream)) done_->block(stream);
  return stream;
}

void DeviceStreams::end(const c10::Stream& stream) {
  // A fresh event: one that a graph recorded cannot be used outside it again.
  done_.emplace(stream.device_type());
  done_->record(stream);
  last_ = stream;
  last_capture_ = api_->stream_capture(stream.native_handle());
}

[[gnu::hot]] bool DeviceStreams::can_follow_last(const c10::Stream& stream) const {
  return last_ && *last_ != stream && api_->stream_capture(stream.native_handle()) == last_capture_;
}

bool DeviceStreams::is_capturing(const c10::Device& device) const {
  return api_->stream_capture(guard_of(device).getStream(device).native_handle()) != 0;
}

[[gnu::hot]] DeviceStreams::Start DeviceStreams::before_delegated(const c10::Device& device,
                                                                  bool asynchronous) {
  const c10::Stream current = guard_of(device).getStream(device);
  if (!can_follow_last(current)) return {current, current};
  // Asked until it has, or each operation from here on would cost the events below.
  if (last_capture_ == 0 && api_->event_ended(done_->eventId()) != 0) {
    last_.reset();
    return {current, current};
  }
  if (asynchronous && last_ == own_ && last_capture_ == 0) {
    event_on(current).block(*own_);
    return {current, *own_};
  }
  done_->block(current);
  last_ = current;  // all that follows on it is behind: wait once
  return {current, current};
}

[[gnu::hot]] DelegatedStream::Call::Call(DelegatedStream& of, const c10::Stream& current)
    : of_(of) {
  {
    const std::lock_guard lock(of_.mutex_);
    of_.stream_ = current;
  }
  ++of_.calls_;
}

dpt_waits DelegatedStream::is_waiting() {
  if (calls_ > 0) return DPT_WAITS_IN_START;
  const std::lock_guard lock(mutex_);
  // Operations that a graph captures do not run now.
  if (!stream_ || api_->stream_capture(stream_->native_handle()) != 0) return DPT_WAITS_NOT;
  if (asked_ && asked_->query()) {
    asked_.reset();
    return DPT_WAITS_NOT;
  }
  if (!asked_) asked_ = event_on(*stream_);
  return DPT_WAITS_ON_STREAM;
}

DeviceWork::DeviceWork(int rank,
                       c10d::OpType op_type,
                       const std::string& profiled_as,
                       uint64_t sequence,
                       std::vector<at::Tensor> results)
    : c10d::Work(rank, op_type, profiled_as.empty() ? nullptr : profiled_as.c_str()),
      sequence_(sequence),
      results_(std::move(results)) {}

// Nobody waited, and PyTorch's allocator would give the memory to the caller's stream while the
// operation is under way. Told of the operation's stream, it holds it back for that. It does
// nothing for memory of other libraries (DLPack): who lends such has to wait.
DeviceWork::~DeviceWork() {
  for (const at::Tensor& tensor : tensors_) {
    try {
      guard_of(tensor.device()).recordDataPtrOnStream(tensor.storage().data_ptr(), *stream_);
    } catch (const std::exception& error) {
      TORCH_WARN_ONCE("deepytorch: PyTorch's allocator did not take word of memory in use: ",
                      error.what());
    }
  }
}

void DeviceWork::started(const c10::Stream& stream, std::vector<at::Tensor> tensors) {
  const c10::impl::VirtualGuardImpl guard = guard_of(stream.device());
  // On the caller's own stream everything after it is behind it already.
  if (guard.getStream(stream.device()) != stream) {
    done_ = event_on(stream);
    tensors_ = std::move(tensors);
  }
  stream_ = stream;
  finish();
}

bool DeviceWork::isCompleted() { return !done_ || done_->query(); }

void DeviceWork::synchronize() {
  if (!done_) return;
  const c10::Device device(done_->device_type(), done_->device_index());
  done_->block(guard_of(device).getStream(device));
  tensors_.clear();
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (timeout == kNoTimeout || !done_) return true;
  const auto end = end_of_wait(timeout);
  while (!done_->query()) {
    if (std::chrono::steady_clock::now() >= end) {
      std::rethrow_exception(make_exception(
          DPT_ERR_TIMEOUT,
          "#" + std::to_string(sequence_) + ": wait() gave up after " +
              std::to_string(timeout.count()) + " ms; the operation is still under way"));
    }
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream_->device()});
    const c10::StreamGuard on_stream(*stream_);  // what hooks do with the result comes behind it
    future_->markCompleted(at::IValue(results_));
  }
  return future_;
}

}  // namespace dpt::c10d_adapter
