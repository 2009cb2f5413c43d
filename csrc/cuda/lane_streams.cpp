#include "cuda/lane_streams.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/env.hpp"
#include "base/error.hpp"
#include "cuda/driver.hpp"

namespace dpt::cuda {

// The sets that no group has. Streams live as long as the process.
class LaneStreams::Device {
 public:
  static Device& of(int device) {
    static std::mutex mutex;
    static auto* const devices = new std::map<int, Device>;
    const std::lock_guard lock(mutex);
    return (*devices)[device];
  }

  std::vector<cudaStream_t> take() {
    const std::lock_guard lock(mutex_);
    const int sets = std::max(1, env().gpu_queues / kCount);
    if (!is_made_) make(sets);
    if (free_.empty()) {
      throw Error(DPT_ERR_SYSTEM,
                  "the GPU's queues serve " + std::to_string(sets) +
                      " groups of a process and others have them; with "
                      "CUDA_DEVICE_MAX_CONNECTIONS=32 they serve 8");
    }
    std::vector<cudaStream_t> set = std::move(free_.back());
    free_.pop_back();
    return set;
  }

  void give_back(std::vector<cudaStream_t> set) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(set));
  }

 private:
  void make(int sets) {
    int least = 0;
    int greatest = 0;
    DPT_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    free_.assign(sets, {});
    for (std::vector<cudaStream_t>& set : free_) {
      for (int lane = 0; lane < kCount; ++lane) {
        set.push_back(nullptr);
        DPT_CUDA_CHECK(cudaStreamCreateWithPriority(&set.back(), cudaStreamNonBlocking, greatest));
      }
    }
    is_made_ = true;
  }

  std::mutex mutex_;
  bool is_made_ = false;
  std::vector<std::vector<cudaStream_t>> free_;
};

LaneStreams::LaneStreams(int device) : device_(Device::of(device)), set_(device_.take()) {}

LaneStreams::~LaneStreams() { device_.give_back(std::move(set_)); }

}  // namespace dpt::cuda
