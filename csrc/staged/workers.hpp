// The threads of a process that do the processor's part for all its staged groups.
//
// A worker never waits for one group. It goes round all groups and does what can be done, so ranks
// may have several groups under way in different orders. With nothing under way all of them sleep;
// while something is they spin a little, then sleep for some microseconds at a time, because no
// device wakes them.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "base/types.hpp"
#include "staged/pipeline.hpp"

namespace dpt::staged {

class Workers {
 public:
  // `cpus`: where they run; empty, or none of them allowed: wherever this process may. `spin`: how
  // long one looks for work without sleeping.
  Workers(int threads, const std::vector<int>& cpus, std::chrono::microseconds spin);
  ~Workers();  // after all groups were removed
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }
  // `pipeline` was made for as many workers as these.
  void add(Pipeline* pipeline);
  // On return no worker uses it any more.
  void remove(Pipeline* pipeline);
  // Something was enqueued.
  void wake();

 private:
  struct alignas(kCacheLine) Seen {
    std::atomic<uint64_t> version{0};
  };

  void change(Pipeline* added, const Pipeline* removed);
  void run(int worker);

  const std::vector<int> cpus_;
  const std::chrono::microseconds spin_;
  std::mutex mutex_;
  std::vector<Pipeline*> pipelines_;
  std::atomic<uint64_t> version_{0};  // of pipelines_
  std::vector<Seen> seen_;
  std::atomic<uint32_t> doorbell_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;  // last: they use everything above
};

// Restricts the calling thread to `cpus`, as far as it is allowed to use them.
void run_near(const std::vector<int>& cpus);

}  // namespace dpt::staged
