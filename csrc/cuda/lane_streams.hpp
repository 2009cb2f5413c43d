// The streams that are a staged group's lanes.
//
// A driver has few queues for all streams of a process and deals them out in turn
// (CUDA_DEVICE_MAX_CONNECTIONS in NVIDIA's CUDA programming guide; 8 unless it is set). Streams
// that share one wait for each other: groups that ranks begin in different orders would then wait
// for each other in a circle. So a device's streams are made at once, as many as there are queues,
// and a group without a set of its own is none.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "staged/copy_engine.hpp"

namespace dpt::cuda {

class LaneStreams {
 public:
  static constexpr int kCount = 2 * staged::Lane::kCount;

  // `device` is the current one. Throws Error(DPT_ERR_SYSTEM) where other groups have all of them.
  explicit LaneStreams(int device);
  ~LaneStreams();
  LaneStreams(const LaneStreams&) = delete;
  LaneStreams& operator=(const LaneStreams&) = delete;

  cudaStream_t operator[](int index) const { return set_[index]; }

 private:
  class Device;

  Device& device_;
  std::vector<cudaStream_t> set_;
};

}  // namespace dpt::cuda
