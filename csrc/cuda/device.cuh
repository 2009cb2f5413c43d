// The few things a kernel needs of the device: who it is, memory other GPUs see, waiting together.
//
// Kernels use nothing else of CUDA, so tests run them on host threads: there
// tests/csrc/emulated_device.hpp stands in for this file's lower half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/layout.hpp"

#ifdef DPT_EMULATED_DEVICE
#include "emulated_device.hpp"
#else

#define DPT_DEVICE __device__ __forceinline__
#define DPT_DEVICE_CALL __device__ __noinline__
#define DPT_SHARED(type, name) __shared__ type name

namespace dpt::cuda {

DPT_DEVICE int channel_index() { return static_cast<int>(blockIdx.x); }
DPT_DEVICE int num_channels() { return static_cast<int>(gridDim.x); }
DPT_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
DPT_DEVICE int num_threads() { return static_cast<int>(blockDim.x); }

DPT_DEVICE void sync_channel() { __syncthreads(); }
// Whether `ok` holds in every thread of the channel.
DPT_DEVICE bool sync_channel_and(bool ok) { return __syncthreads_and(ok) != 0; }

// The host's word lies behind PCIe, so it is read rarely.
constexpr uint32_t kPollsPerCheck = 1024;

constexpr int kWarp = 32;
DPT_DEVICE void sync_warp() { __syncwarp(); }
DPT_DEVICE bool warp_and(bool ok) { return __all_sync(~0u, ok) != 0; }

// Words in shared memory, between the channel's threads: what was written before a store or a count
// is seen after the load that reads it.
DPT_DEVICE uint32_t shared_address(const uint32_t* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}
DPT_DEVICE uint32_t load_shared(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
               : "=r"(value)
               : "r"(shared_address(from))
               : "memory");
  return value;
}
DPT_DEVICE void store_shared(uint32_t* to, uint32_t value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;"
               :
               : "r"(shared_address(to)), "r"(value)
               : "memory");
}

DPT_DEVICE uint64_t clock_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// Flags between GPUs: what was written before a release is seen after the acquire that reads it.
DPT_DEVICE uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
DPT_DEVICE uint64_t load_acquire(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
DPT_DEVICE void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}
DPT_DEVICE void store_release(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
}
// Orders nothing.
DPT_DEVICE uint32_t load_relaxed(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
DPT_DEVICE uint64_t load_relaxed(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
DPT_DEVICE void store_relaxed(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}
// Puts 0 in place of `old`, unless there is something else by now.
DPT_DEVICE void clear_relaxed(uint64_t* at, uint64_t old) {
  [[maybe_unused]] uint64_t found;
  asm volatile("atom.cas.relaxed.sys.global.b64 %0, [%1], %2, %3;"
               : "=l"(found)
               : "l"(at), "l"(old), "l"(uint64_t{0})
               : "memory");
}

// Staging that a peer wrote, past this SM's own cache.
DPT_DEVICE uint4 load_staged(const uint4* from) {
  uint4 value;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}
// A line of data and flags; each aligned half of it arrives whole.
DPT_DEVICE void store_line(uint4* to, uint4 value) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
DPT_DEVICE uint4 load_line(const uint4* from) { return load_staged(from); }

// One line of a packet, of which each of eight neighbouring threads has its part. It is written and
// read by one instruction of all of them, so the warp must be together: see sync_warp.
DPT_DEVICE void store_lane(uint4* to, uint4 value) { store_line(to, value); }
DPT_DEVICE uint4 load_lane(const uint4* from) { return load_staged(from); }

}  // namespace dpt::cuda
#endif
