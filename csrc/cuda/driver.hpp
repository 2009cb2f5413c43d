// Functions of libcuda, found through the runtime, so that the core loads where there is no driver.
#pragma once

#include <string>

#include "cuda/checks.hpp"

namespace dpt::cuda {

template <typename Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kVersion = 12000;
  check(cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result), name);
  if (found == nullptr || result != cudaDriverEntryPointSuccess) {
    throw Error(DPT_ERR_SYSTEM, std::string("this CUDA driver has no ") + name);
  }
  return reinterpret_cast<Function>(found);
}

}  // namespace dpt::cuda

#define DPT_DRIVER(name) ::dpt::cuda::driver_function<decltype(&::name)>(#name)
