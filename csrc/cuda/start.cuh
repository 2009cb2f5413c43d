// Starting a kernel for the element type and the operation of a call.
#pragma once

#include <string>

#include "base/error.hpp"
#include "cuda/arguments.hpp"
#include "cuda/vectors.cuh"

#ifdef DPT_EMULATED_DEVICE
#define DPT_KERNEL inline void
#define DPT_PARAMETER const
#else
#include <cuda_runtime.h>
#define DPT_KERNEL __global__ void __launch_bounds__(::dpt::cuda::kMostThreads)
// Indexed where it lies, not from a copy in every thread's local memory.
#define DPT_PARAMETER const __grid_constant__

namespace dpt::cuda {

template <typename... Parameters, typename... Arguments>
void start(void (*kernel)(Parameters...), const Launch& launch, Arguments... arguments) {
  void* pointers[] = {&arguments...};
  const cudaError_t error = cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                                             dim3(launch.grid.channels),
                                             dim3(launch.grid.threads),
                                             pointers,
                                             0,
                                             static_cast<cudaStream_t>(launch.stream));
  if (error != cudaSuccess) {
    throw Error(DPT_ERR_SYSTEM, std::string("starting a kernel: ") + cudaGetErrorString(error));
  }
}

template <typename... Parameters>
void load(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) {
    throw Error(DPT_ERR_SYSTEM, std::string("loading a kernel: ") + cudaGetErrorString(error));
  }
}

}  // namespace dpt::cuda
#endif

namespace dpt::cuda {

// Reductions with low-latency kernels. premul_sum and avg are sums with factors around them.
template <typename Visitor>
bool visit_dtype(DataType dtype, Visitor visitor) {
  switch (dtype) {
    case DPT_FLOAT32:
      return visitor(float{}), true;
    case DPT_BFLOAT16:
      return visitor(__nv_bfloat16{}), true;
    case DPT_FLOAT16:
      return visitor(__half{}), true;
    case DPT_FLOAT64:
      return visitor(double{}), true;
    case DPT_INT32:
      return visitor(int32_t{}), true;
    case DPT_INT64:
      return visitor(int64_t{}), true;
    default:
      return false;
  }
}
template <typename Visitor>
bool visit_reduce_op(ReduceOp op, Visitor visitor) {
  switch (op) {
    case DPT_SUM:
    case DPT_AVG:
    case DPT_PREMUL_SUM:
      return visitor(Sum{}), true;
    case DPT_MIN:
      return visitor(Min{}), true;
    case DPT_MAX:
      return visitor(Max{}), true;
    default:
      return false;
  }
}
// Those with kernels for large messages: sums of what models are trained in. The rest is rare in
// training, and every kernel costs compile time and space.
template <typename Visitor>
bool visit_large_dtype(DataType dtype, Visitor visitor) {
  const bool has = dtype == DPT_FLOAT32 || dtype == DPT_BFLOAT16 || dtype == DPT_FLOAT16;
  return has && visit_dtype(dtype, [&](auto element) {
           if constexpr (sizeof(element) <= sizeof(float) &&
                         !std::is_integral_v<decltype(element)>) {
             visitor(element);
           }
         });
}

// Kernels that hold something of every rank in registers come for few ranks and for all.
constexpr int kFewRanks = 4;
template <typename Visitor>
void visit_ranks(int size, Visitor visitor) {
  if (size <= kFewRanks) {
    visitor(std::integral_constant<int, kFewRanks>{});
  } else {
    visitor(std::integral_constant<int, kMaxRanks>{});
  }
}
// Calls `visitor` with a T and the number of ranks.
template <typename Visitor>
void visit_large(DataType dtype, const GroupView& group, Visitor visitor) {
  visit_large_dtype(dtype, [&](auto element) {
    visit_ranks(group.layout.size, [&](auto ranks) { visitor(element, ranks); });
  });
}
template <typename Visitor>
void for_each_large(Visitor visitor) {
  for (const DataType dtype : {DPT_FLOAT32, DPT_BFLOAT16, DPT_FLOAT16}) {
    visit_large_dtype(dtype, [&](auto element) {
      for (const int size : {kFewRanks, kMaxRanks}) {
        visit_ranks(size, [&](auto ranks) { visitor(element, ranks); });
      }
    });
  }
}

// Calls `visitor` with a T and an Op.
template <typename Visitor>
void visit_reduction(DataType dtype, ReduceOp op, Visitor visitor) {
  const bool found = visit_dtype(dtype, [&](auto element) {
    const bool has_op = visit_reduce_op(op, [&](auto operation) { visitor(element, operation); });
    DPT_CHECK(has_op);
  });
  DPT_CHECK(found);
}

}  // namespace dpt::cuda
