// Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq.
#include "host/reduce_kernels.hpp"

namespace dpt {

ReduceKernel find_avx512_kernel(DataType dtype, ReduceOp op) { return find_kernel<64>(dtype, op); }

}  // namespace dpt
