// The road of operations on an accelerator: Call -> dpt_request -> a kernel on a stream, or the
// delegate's Work.
//
// Thread safety: as c10d asks: any thread, operations in call order, which the streams rely on. It
// has no lock; `first_device_` is atomic.
#pragma once

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <vector>

#include "device.hpp"
#include "operation_parts.hpp"
#include "submitted.hpp"

namespace dpt::c10d_adapter {

class DeviceOperations {
 public:
  // Some of a list's operations, by their places in it.
  using Places = std::vector<size_t>;
  // Starts those of a list on a stock backend, in one piece.
  using Together = c10::function_ref<WorkPtr(c10d::Backend&, const Places&)>;

  DeviceOperations(const OperationParts& parts, DeviceStreams& streams)
      : parts_(parts), streams_(streams) {}

  // Takes the short way if the operation is known to be the stock backend's; false: take `submit`.
  bool start_known(const Call& call, const Replay& replay, WorkPtr* work);
  WorkPtr submit(Call&& call, const Replay& replay, uint64_t sequence);
  // Starts those of a list that are the stock backend's, and returns their places. `work`: receives
  // what `together` gives.
  Places start_together(const at::Device& device,
                        const std::vector<dpt_request>& requests,
                        Together together,
                        WorkPtr* work);
  // Describes an operation that native code may serve, without its buffers; false: it is another.
  bool describe_plain(const Call& call, const at::Device& device, dpt_request* request) const;
  // The device of the first operation; negative: there was none.
  c10::DeviceIndex first_device() const { return first_device_; }

 private:
  // The functions of dpt_request; `call` is a Submitted.
  static void* start_stream(void* call);
  static int is_busy(void* call);

  const OperationParts parts_;
  DeviceStreams& streams_;
  std::atomic<c10::DeviceIndex> first_device_{-1};
};

}  // namespace dpt::c10d_adapter
