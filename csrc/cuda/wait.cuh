// How a kernel waits for another GPU: never for ever.
#pragma once

#include "cuda/device.cuh"

namespace dpt::cuda {

DPT_DEVICE Control& control_of(const GroupView& group, int rank) {
  return *reinterpret_cast<Control*>(group.blocks[rank]);
}
DPT_DEVICE Counters& counters_of(const GroupView& group) {
  return *reinterpret_cast<Counters*>(group.blocks[group.rank] + Layout::counters_offset());
}

// Leaves word for the host and makes every kernel of this rank's group give up.
DPT_DEVICE void give_up(const GroupView& group, HostStatus::Code code, int peer) {
  Counters& counters = counters_of(group);
  HostStatus& status = *group.status;
  if (load_relaxed(&status.code) == HostStatus::kNone) {
    store_relaxed(&status.peer, static_cast<uint32_t>(peer));
    store_relaxed(&status.sequence, load_relaxed(&counters.sequence) + 1);
    store_release(&status.code, code);
  }
  store_relaxed(&status.abort, 1);
  store_relaxed(&counters.failed, 1);
}

// Whether `peer` has begun another operation than this one, whose data may then never come. Of the
// channels only the first can tell: it counts operations, and others may still wait when it has.
DPT_DEVICE bool is_elsewhere(const GroupView& group, const CallView& call, int peer) {
  if (channel_index() != 0 || peer < 0 || peer >= group.layout.size) return false;
  const uint32_t sequence = load_relaxed(&counters_of(group).sequence) + 1;
  const uint64_t word = load_acquire(&control_of(group, group.rank).entered[sequence & 1][peer]);
  return static_cast<uint32_t>(word) == sequence &&
         static_cast<uint32_t>(word >> 32) != call.description;
}

// How long one wait may still go on.
class Patience {
 public:
  // Asked after each poll in vain; true when the group failed or the time is up.
  DPT_DEVICE bool is_over(const GroupView& group, const CallView& call, int peer) {
    if (++polls_ % kPollsPerCheck != 0) return false;
    if (load_relaxed(&group.status->abort) != 0) {
      give_up(group, HostStatus::kAborted, peer);
      return true;
    }
    if (is_elsewhere(group, call, peer)) {
      give_up(group, HostStatus::kMismatch, peer);
      return true;
    }
    const uint64_t now = clock_ns();
    if (start_ == 0) start_ = now;
    if (now - start_ <= call.timeout_ns) return false;
    give_up(group, HostStatus::kTimeout, peer);
    return true;
  }

 private:
  uint32_t polls_ = 0;
  uint64_t start_ = 0;
};

// Polls until `ready()`; false when the group failed first.
template <typename Ready>
DPT_DEVICE bool wait_until(const GroupView& group, const CallView& call, int peer, Ready ready) {
  for (Patience patience; !ready();) {
    if (patience.is_over(group, call, peer)) return false;
  }
  return true;
}

// First and last step of every kernel: tells the neighbours which operation this rank is in, and
// waits for theirs. Neighbours are all peers, unless some don't reach each other's memory.
//
// NOTE [One ahead] No kernel ends before all neighbours have started it, so of each two neighbours
// one is at most one operation ahead. Two copies of whatever a neighbour may still read are
// therefore enough. Ranks further apart may be further ahead of each other, one operation for each
// hop between them, but share no memory: what one writes the other never reads. Each of them still
// runs the same operations in the same order, and where two differ two neighbours do.
//
// A kernel on a group that has failed must send nothing: its peers would take it for what they
// still wait for. And it must not end before the host has decided what follows. Otherwise the work
// behind it on the stream would use what it left undone.
class Attendance {
 public:
  DPT_DEVICE Attendance(const GroupView& group, const CallView& call) : group_(group), call_(call) {
    const Counters& counters = counters_of(group);
    alive_ = load_relaxed(&counters.failed) == 0;
    if (!alive_ || !attends()) return;
    sequence_ = load_relaxed(&counters.sequence) + 1;
    const uint64_t word = uint64_t{call.description} << 32 | sequence_;
    store_release(&control_of(group, thread_index()).entered[sequence_ & 1][group.rank], word);
  }

  // False: the group has failed, send nothing. Threads may differ in it.
  DPT_DEVICE bool is_alive() const { return alive_; }

  // All threads of the channel: whether all is well in all of them, `ok` included.
  DPT_DEVICE bool end(bool ok) const {
    ok = sync_channel_and(ok && alive_ && peer_is_here());
    if (!ok) wait_for_host();
    if (ok && is_first()) {
      store_relaxed(&counters_of(group_).sequence, sequence_);
    }
    return ok;
  }

 private:
  DPT_DEVICE void wait_for_host() const {
    constexpr uint64_t kMostNs = 10'000'000'000;
    if (thread_index() != 0) return;
    const uint64_t start = clock_ns();
    while (load_relaxed(&group_.status->released) == 0 && clock_ns() - start < kMostNs) {
    }
  }
  // Only channel 0 attends, thread p for neighbour p.
  DPT_DEVICE bool attends() const {
    return channel_index() == 0 && thread_index() < kMaxRanks &&
           (group_.neighbours >> thread_index() & 1) != 0;
  }
  DPT_DEVICE bool is_first() const {
    return attends() && (group_.neighbours & ((1u << thread_index()) - 1)) == 0;
  }
  DPT_DEVICE bool peer_is_here() const {
    if (!attends()) return true;
    const int peer = thread_index();
    const uint64_t* entered = &control_of(group_, group_.rank).entered[sequence_ & 1][peer];
    uint64_t word = 0;
    const bool here = wait_until(group_, call_, peer, [&] {
      word = load_acquire(entered);
      return static_cast<uint32_t>(word) == sequence_;
    });
    if (!here) return false;
    if (static_cast<uint32_t>(word >> 32) == call_.description) return true;
    give_up(group_, HostStatus::kMismatch, peer);
    return false;
  }

  const GroupView& group_;
  const CallView& call_;
  bool alive_;
  uint32_t sequence_ = 0;
};

}  // namespace dpt::cuda
