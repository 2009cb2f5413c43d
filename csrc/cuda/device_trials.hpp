// Tools that time operations on a device: scratch memory, a clock that counts on the device, and a
// gate behind which calls queue up.
//
// One object serves one measurement, on one stream, in one thread. It frees in the order of the
// stream what it allocates: nothing here waits for the device.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "cuda/arguments.hpp"

namespace dpt {

namespace cuda {

// The properties that a device's speed depends on, and which device of all it is.
struct DeviceModel {
  std::string name;  // "NVIDIA H200"
  int num_sms;
  std::string uuid;  // as NVML writes it: "GPU-..."
};
DeviceModel model_of(int device);
// Whether NVLink leads from the device to the one with this uuid; nothing where this process does
// not see that one.
std::optional<bool> has_nvlink(int device, const std::string& uuid);
// Whether the device reaches that one's memory, in the same way.
std::optional<bool> has_peer_access(int device, const std::string& uuid);

}  // namespace cuda

class DeviceTrials {
 public:
  // Throws Error(DPT_ERR_SYSTEM), as all of this does when CUDA fails.
  static std::unique_ptr<DeviceTrials> on(int device, cuda::Stream stream);
  virtual ~DeviceTrials() = default;

  // False: each launch waits for its kernel (CUDA_LAUNCH_BLOCKING, profilers), so nothing can be
  // queued behind a gate.
  virtual bool can_queue() = 0;
  // Whether everything that was on the stream at the first such call has ended.
  virtual bool is_idle() = 0;
  virtual size_t free_bytes() const = 0;
  // Zeros, valid until this object goes; nullptr when there is no such memory. At most once.
  virtual char* allocate(size_t bytes) = 0;

  // Work put on the stream from here on waits for `open_gate`, at most two seconds.
  virtual void close_gate() = 0;
  virtual void open_gate() = 0;
  virtual void start_clock() = 0;
  virtual void stop_clock() = 0;
  // Between the two in microseconds; nothing while that has not ended.
  virtual std::optional<double> elapsed_us() = 0;
};

}  // namespace dpt
