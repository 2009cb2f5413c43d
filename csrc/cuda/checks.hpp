// CUDA's error codes as Error(DPT_ERR_SYSTEM) with the call and CUDA's own words.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "base/error.hpp"

namespace dpt::cuda {

inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // it is told here; the program's next CUDA call must not fail with it
  throw Error(DPT_ERR_SYSTEM, std::string(call) + ": " + cudaGetErrorString(error));
}
void check(CUresult result, const char* call);

// Makes `device` current, and again what was before.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceScope() { cudaSetDevice(before_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
};

// While a graph is captured, in whatever thread, calls that might disturb that are errors unless
// their own thread says that it knows: what is done here has nothing to do with a captured stream.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() { cudaThreadExchangeStreamCaptureMode(&mode_); }

  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace dpt::cuda

#define DPT_CUDA_CHECK(call) ::dpt::cuda::check(call, #call)
