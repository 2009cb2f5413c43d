// A team does one phase of a kernel, round by round, beside the channel's other teams. Its last
// warp is the signal warp: it waits for the peers and signals them, while the other warps, the
// workers, move data. So neither a peer's answer nor a fence stands in the workers' way.
#pragma once

#include "cuda/wait.cuh"

namespace dpt::cuda {

// How far a team has come, in shared memory; all 0 when the kernel starts.
struct Progress {
  uint32_t ready;                    // rounds that workers may begin; kStop: none, ever
  uint32_t done[kMostThreads / 32];  // rounds that each warp of workers has done
  static constexpr uint32_t kStop = ~0u;
};

// Some of a team's workers, as its work on one chunk sees them.
struct WorkerGroup {
  int thread;
  int num_threads;
};

// The tasks of a signal warp. Each of its threads calls all of these.
template <typename MayBegin, typename Finish, typename Close>
struct SignalWarp {
  MayBegin may_begin;  // (round): whether this thread's peer is ready for it
  Finish finish;       // (round): the workers are done with it
  Close close;         // (): after the last
};

class Team {
 public:
  // Takes `warps` warps from number `first` on, at least two.
  DPT_DEVICE Team(
      const GroupView& group, const CallView& call, int first, int warps, Progress& progress)
      : group_(group),
        call_(call),
        thread_(thread_index() - first * kWarp),
        warps_(warps),
        progress_(progress) {}

  DPT_DEVICE bool has_me() const { return 0 <= thread_ && thread_ < warps_ * kWarp; }
  // The peer that this thread of the signal warp's waits for and signals; -1 where it is no such
  // thread.
  DPT_DEVICE int signal_peer() const {
    const int peer = thread_ - num_threads();
    return 0 <= peer && peer < group_.layout.size && peer != group_.rank ? peer : -1;
  }
  // Workers': all of them, and visit(part, workers) for every part, each with workers of its own
  // where there are enough. So the memory of several peers is at work at a time.
  DPT_DEVICE WorkerGroup workers() const { return {thread_, num_threads()}; }
  template <typename Visit>
  DPT_DEVICE void split(int parts, Visit visit) const {
    const int each = warps_ - 1 > parts ? (warps_ - 1) / parts : 1;
    const int num_groups = (warps_ - 1) / each;
    const int own = thread_ / kWarp / each;
    if (own >= num_groups) return;
    const WorkerGroup mine{thread_ - own * each * kWarp, each * kWarp};
    for (int part = own; part < parts; part += num_groups) visit(part, mine);
  }

  // Asked by another team: whether this one's workers are done with a round, and what they wrote in
  // it can be read.
  DPT_DEVICE bool did(uint32_t round) const {
    for (int warp = 0; warp < warps_ - 1; ++warp) {
      if (load_shared(&progress_.done[warp]) <= round) return false;
    }
    return true;
  }

  // All rounds: `move` is the workers' part of one. False when the group failed.
  template <typename Move, typename Books>
  DPT_DEVICE bool run(uint32_t rounds, Move move, const Books& signal_warp) const {
    if (thread_ < num_threads()) return work(rounds, move);
    if (!keep_books(rounds, signal_warp)) return false;
    signal_warp.close();
    return true;
  }

 private:
  DPT_DEVICE int num_threads() const { return (warps_ - 1) * kWarp; }
  template <typename Move>
  DPT_DEVICE bool work(uint32_t rounds, Move move) const {
    for (uint32_t round = 0; round < rounds; ++round) {
      uint32_t ready;
      while ((ready = load_shared(&progress_.ready)) <= round) {
      }
      if (ready == Progress::kStop) return false;
      move(round);
      sync_warp();
      if (thread_ % kWarp == 0) store_shared(&progress_.done[thread_ / kWarp], round + 1);
    }
    return true;
  }

  template <typename Books>
  DPT_DEVICE bool keep_books(uint32_t rounds, const Books& signal_warp) const {
    const bool leads = thread_ % kWarp == 0;
    sync_warp();  // what its threads know of the queues is in shared memory
    bool alive = warp_and(load_relaxed(&counters_of(group_).failed) == 0);
    Patience patience;
    uint32_t begun = 0;
    for (uint32_t finished = 0; finished < rounds;) {
      if (begun < rounds) {
        const bool mine = alive && signal_warp.may_begin(begun);
        if (warp_and(mine)) {
          sync_warp();  // as above: queues may have found a landing
          ++begun;
          patience = {};
          if (leads) store_shared(&progress_.ready, begun);
        } else {
          alive = alive && warp_and(mine || !patience.is_over(group_, call_, signal_peer()));
          if (!alive) {
            if (leads) store_shared(&progress_.ready, Progress::kStop);
            return false;
          }
        }
      }
      if (warp_and(workers_did(finished))) signal_warp.finish(finished++);
    }
    return true;
  }

  // Each thread of the signal warp looks at some of the warps; all of them together see every one.
  DPT_DEVICE bool workers_did(uint32_t round) const {
    for (int warp = thread_ % kWarp; warp < warps_ - 1; warp += kWarp) {
      if (load_shared(&progress_.done[warp]) <= round) return false;
    }
    return true;
  }

  const GroupView& group_;
  const CallView& call_;
  int thread_;
  int warps_;
  Progress& progress_;
};

}  // namespace dpt::cuda
