// 16-byte vectors: what every x86-64 (SSE2) and aarch64 (NEON) processor has.
#include "host/reduce_kernels.hpp"

namespace dpt {

ReduceKernel find_portable_kernel(DataType dtype, ReduceOp op) {
  return find_kernel<16>(dtype, op);
}

}  // namespace dpt
