// All that reduce.cpp knows of each instruction set's file: how to look up its kernels.
#pragma once

#include "host/reduce.hpp"

namespace dpt {

using ReduceKernel = void (*)(const ReduceArgs& args);

// nullptr for a pair that has no kernel: the same pairs in every instruction set.
ReduceKernel find_portable_kernel(DataType dtype, ReduceOp op);
#if defined(__x86_64__)
ReduceKernel find_avx2_kernel(DataType dtype, ReduceOp op);
ReduceKernel find_avx512_kernel(DataType dtype, ReduceOp op);
#endif

}  // namespace dpt
