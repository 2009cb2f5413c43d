// Sets what a thread's calls of CUDA are about for a while: a device, and no captured graph.
#pragma once

#include <cuda.h>

namespace dpt::cuda {

// Makes `device` current, and again what was before; a thread of the core's own stays there. Unlike
// cudaSetDevice it makes no context on the device that was current before. In a thread that has
// used no device this is GPU 0, whoever's that is.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  bool pushed_ = false;
};

// While a graph is captured, in whatever thread, calls that might disturb that are errors unless
// their own thread says that it knows. This says so: what is done here has nothing to do with a
// captured stream. It has no effect where there is no driver.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange();

  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace dpt::cuda
