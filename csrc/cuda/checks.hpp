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

}  // namespace dpt::cuda

#define DPT_CUDA_CHECK(call) ::dpt::cuda::check(call, #call)
