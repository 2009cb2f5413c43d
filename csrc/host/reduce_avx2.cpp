// Compiled with -mavx2 -mf16c.
#include "host/reduce_kernels.hpp"

namespace dpt {

ReduceKernel find_avx2_kernel(DataType dtype, ReduceOp op) { return find_kernel<32>(dtype, op); }

}  // namespace dpt
