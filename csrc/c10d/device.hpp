// Operations on an accelerator: streams and events through c10's own generic guard, so that the
// adapter needs no CUDA header.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "work.hpp"

namespace dpt::c10d_adapter {

// The streams on which one group's native operations run, in the order of the calls.
//
// An operation that the caller waits for anyway runs on the caller's own stream; an asynchronous
// one on a stream of the group, behind what the caller's stream holds. Kernels of a group share
// flags, so each waits for the one before wherever that ran. What one graph captures and what it
// does not cannot be ordered by events: that is the program's to do.
// Thread safety: none, as operations come in call order.
class DeviceStreams {
 public:
  explicit DeviceStreams(const dpt_api* api) : api_(api) {}

  // Returns the stream that the next operation runs on; its inputs are ready there.
  c10::Stream begin(const c10::Device& device, bool asynchronous);
  // It is on that stream.
  void end(const c10::Stream& stream);
  // Whether a graph captures the caller's stream.
  bool is_capturing(const c10::Device& device) const;
  struct Start {
    c10::Stream current;  // the caller's
    c10::Stream from;     // behind the native operations, and behind what `current` holds
  };
  // Tells where the stock backend is to start its next operation from. An asynchronous one does not
  // make the caller's stream wait for native ones: gradients' products would stand still for the
  // bucket before. Graphs are captured on the caller's stream alone.
  Start before_delegated(const c10::Device& device, bool asynchronous);

 private:
  // Whether the last operation and what comes on `stream` can be ordered by an event.
  bool can_follow_last(const c10::Stream& stream) const;

  const dpt_api* api_;
  std::optional<c10::Stream> own_;
  std::optional<c10::Stream> last_;  // what comes on it is behind the last one; none: that ended
  uint64_t last_capture_ = 0;
  std::optional<c10::Event> done_;
};

// Whether the program's stream waits for what the stock backend does on a device. Asked by another
// thread once a rank is lost, for which NCCL's kernels wait without end.
class DelegatedStream {
 public:
  explicit DelegatedStream(const dpt_api* api) : api_(api) {}

  // While the stock backend starts an operation; its first one meets the other ranks.
  class Call {
   public:
    // `current`: the caller's stream.
    Call(DelegatedStream& of, const c10::Stream& current);
    ~Call() { --of_.calls_; }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    DelegatedStream& of_;
  };

  dpt_waits is_waiting();
  bool is_starting() const { return calls_ > 0; }

 private:
  const dpt_api* api_;
  std::atomic<int> calls_{0};
  std::mutex mutex_;
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> asked_;
};

// Work of a kernel that is on its stream: waiting makes the caller's stream wait, not the caller.
class DeviceWork : public c10d::Work {
 public:
  DeviceWork(int rank,
             c10d::OpType op_type,
             const std::string& profiled_as,
             uint64_t sequence,
             std::vector<at::Tensor> results);
  // Also before anybody waited: a hook may keep the future alone, a program nothing at all.
  ~DeviceWork() override;

  // The operation's kernels are on `stream`; `tensors` are what they use.
  void started(const c10::Stream& stream, std::vector<at::Tensor> tensors);

  bool isCompleted() override;
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  uint64_t sequence_;
  std::vector<at::Tensor> results_;
  std::vector<at::Tensor> tensors_;  // alive until the caller's stream is behind the operation
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> done_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when first asked for
};

}  // namespace dpt::c10d_adapter
