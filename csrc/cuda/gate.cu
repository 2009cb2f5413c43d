// One thread that polls a word of the host.
#include "cuda/device.cuh"
#include "cuda/gate.hpp"
#include "cuda/start.cuh"

namespace dpt::cuda {
namespace {

DPT_KERNEL gate_kernel(const uint32_t* word, uint32_t ticket, uint64_t timeout_ns) {
  const uint64_t start = clock_ns();
  while (load_acquire(word) != ticket && clock_ns() - start < timeout_ns) {
  }
}

}  // namespace

void load_gate() { load(gate_kernel); }

void start_gate(Stream stream, const uint32_t* word, uint32_t ticket, uint64_t timeout_ns) {
  start(gate_kernel, Launch{{}, {}, {1, 1}, stream, 0}, word, ticket, timeout_ns);
}

}  // namespace dpt::cuda
