// Some of a channel's threads, which wait for each other and for nobody else. Teams of one kernel
// do its phases side by side: one's wait for a peer is hidden behind the others' work.
#pragma once

#include "cuda/device.cuh"

namespace dpt::cuda {

class Team {
 public:
  // Of `count` threads from `first` on, whole warps. `number` is the team's own in its kernel.
  DPT_DEVICE Team(int number, int first, int count)
      : number_(number), thread_(thread_index() - first), count_(count) {}

  DPT_DEVICE bool has_me() const { return 0 <= thread_ && thread_ < count_; }
  DPT_DEVICE int thread() const { return thread_; }
  DPT_DEVICE int num_threads() const { return count_; }

  DPT_DEVICE void sync() const { sync_team(number_, count_); }
  // Whether `ok` holds in every thread of the team.
  DPT_DEVICE bool sync_and(bool ok) const { return sync_team_and(number_, count_, ok); }

 private:
  int number_;
  int thread_;
  int count_;
};

}  // namespace dpt::cuda
