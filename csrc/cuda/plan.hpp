// The tuner's plan for one operation on the device; identical on every rank of the group.
#pragma once

#include <cstddef>
#include <string>

#include "base/algorithm_name.hpp"

namespace dpt {

namespace cuda {

// How many thread blocks of how many threads; the same on every rank.
struct Grid {
  int channels;
  int threads;
};

// How a group without peer access is staged through the host's memory; the same on every rank.
struct Staging {
  int ranks = 0;          // of each node
  size_t slot_bytes = 0;  // 0: it isn't
  int depth = 0;          // slots of each rank
  int threads = 0;        // most workers of each rank
  int nodes = 1;
};

}  // namespace cuda

struct DevicePlan {
  AlgorithmName algorithm = AlgorithmName::kDelegate;
  cuda::Grid grid{0, 0};   // of cpu_reduce: slots and workers of each rank; none: GPUs add
  size_t chunk_bytes = 0;  // what a slot of a queue carries at most; 0: all it holds
  std::string reason;
  int delegated = 0;  // percent of the message that the delegate carries out at the same time
};

}  // namespace dpt
