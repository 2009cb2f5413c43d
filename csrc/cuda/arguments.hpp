// Arguments that kernels are started with, and the entry points that start them. The one header of
// this folder that host code and kernels share beside layout.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.hpp"
#include "cuda/layout.hpp"
#include "cuda/plan.hpp"

#ifdef __CUDACC__
#define DPT_HOST_DEVICE __host__ __device__
#else
#define DPT_HOST_DEVICE
#endif

namespace dpt::cuda {

// How `bytes` are cut into chunks of the same size: in every round, each share has one.
struct Cut {
  uint64_t bytes;
  uint32_t chunk;  // bytes, whole vectors
  uint32_t rounds;

  // The size of the chunk that begins there.
  DPT_HOST_DEVICE uint32_t bytes_at(uint64_t offset) const {
    if (offset >= bytes) return 0;
    return bytes - offset < chunk ? static_cast<uint32_t>(bytes - offset) : chunk;
  }

  static Cut of(uint64_t bytes, uint64_t shares, uint64_t most) {
    constexpr uint64_t kVector = 16;
    const uint64_t rounds = (bytes + shares * most - 1) / (shares * most);
    if (rounds == 0) return {0, 0, 0};
    const uint64_t chunk = (bytes + rounds * shares - 1) / (rounds * shares);
    return {bytes,
            static_cast<uint32_t>((chunk + kVector - 1) / kVector * kVector),
            static_cast<uint32_t>(rounds)};
  }
};

// Parts that ranks reduce: rank p receives parts[p] of every rank. In an all_reduce by
// low_latency_reduce all of them are the whole input.
struct ReduceArguments {
  const char* parts[kMaxRanks];
  char* output;
  uint64_t bytes;  // of one part
  double input_factor;
  double result_factor;
};

struct AllReduceArguments {
  const char* input;
  char* output;
  uint64_t bytes;
  double input_factor;
  double result_factor;
};

// Parts that ranks exchange unreduced; this rank's own is copied. nullptr where there is none.
struct ExchangeArguments {
  const char* send[kMaxRanks];
  uint64_t send_bytes[kMaxRanks];
  char* receive[kMaxRanks];
  uint64_t receive_bytes[kMaxRanks];
};

// Parts that go round the ring: `num_origins` ranks, all or one, give a part of `bytes` each for
// everyone.
struct RingArguments {
  const char* input;  // this rank's, where it is an origin
  char* output[kMaxRanks];
  uint64_t bytes;
  int first_origin;
  int num_origins;
};

// A stream of the device, as CUDA's driver names it.
using Stream = void*;

// One launch's surroundings.
struct Launch {
  GroupView group;
  CallView call;
  Grid grid;
  Stream stream;
  uint32_t chunk_bytes;  // most that one slot is to carry

  Cut cut(uint64_t bytes, uint64_t shares_per_channel = 1) const {
    return Cut::of(bytes, shares_per_channel * static_cast<uint64_t>(grid.channels), chunk_bytes);
  }
};

// Each starts one kernel and returns. Whether a dtype and operation can be reduced: can_reduce. One
// more is in trees/tree_all_reduce.hpp.
void low_latency_reduce(const Launch& launch,
                        const ReduceArguments& arguments,
                        DataType dtype,
                        ReduceOp op);
void low_latency_exchange(const Launch& launch, const ExchangeArguments& arguments);
void packet_all_reduce(const Launch& launch,
                       const AllReduceArguments& arguments,
                       DataType dtype,
                       ReduceOp op);
void packet_reduce_scatter(const Launch& launch,
                           const ReduceArguments& arguments,
                           DataType dtype,
                           ReduceOp op);
// Takes equal parts.
void packet_exchange(const Launch& launch, const ExchangeArguments& arguments);
void push_reduce_scatter(const Launch& launch,
                         const ReduceArguments& arguments,
                         DataType dtype,
                         ReduceOp op);
void two_shot_all_reduce(const Launch& launch,
                         const AllReduceArguments& arguments,
                         DataType dtype,
                         ReduceOp op);
void push_exchange(const Launch& launch, const ExchangeArguments& arguments);
void ring_exchange(const Launch& launch, const RingArguments& arguments);

bool can_reduce_on_device(DataType dtype, ReduceOp op);
// Whether it can also where the message is too large for low_latency_reduce.
bool has_large_kernels(DataType dtype, ReduceOp op);
// Loads every kernel; the first launch of one that is loaded late can block behind a waiting
// kernel.
void load_kernels();

}  // namespace dpt::cuda
