// A channel's queues to and from its peers: chunks of up to slot_bytes, pushed into the receiver's
// memory. Thread p of a team's clerk keeps the books for peer p; workers see only slots.
//
// Sender:    has_room -> workers write to slot(peer) -> publish
// Receiver:  has_come -> workers read slot(peer)     -> release
#pragma once

#include "cuda/team.cuh"

namespace dpt::cuda {

// The number of the kernel's first chunk in the queue with each peer, for all threads of a team.
struct FirstChunks {
  uint32_t of[kMaxRanks];
};
// Of all the ends of a kernel's queues, in shared memory.
struct QueueEnds {
  FirstChunks sender[kNumLanes];
  FirstChunks receiver[kNumLanes];
};

DPT_DEVICE uint32_t all_peers(const GroupView& group) {
  return ((1u << group.layout.size) - 1) & ~(1u << group.rank);
}
DPT_DEVICE bool has_peer(uint32_t peers, int peer) { return peer >= 0 && (peers >> peer & 1) != 0; }

// In `owner`'s block, of this channel's queue that `from` fills.
DPT_DEVICE uint4* slot_at(const GroupView& group, int owner, Lane lane, int from, uint32_t chunk) {
  const Layout& layout = group.layout;
  const uint32_t queue = (lane * layout.channels + channel_index()) * layout.size + from;
  const size_t at = size_t{queue * kNumSlots + chunk % kNumSlots} * layout.slot_bytes;
  return reinterpret_cast<uint4*>(group.blocks[owner] + layout.slots_offset() + at);
}

class Sender {
 public:
  DPT_DEVICE Sender(const GroupView& group, Lane lane, QueueEnds& ends, const Team& team)
      : group_(group), lane_(lane), first_(ends.sender[lane]), peer_(team.clerk_peer()) {
    if (peer_ >= 0) first_.of[peer_] = mine_ = count();
  }

  // Whether the queue to this thread's peer has room for the chunk of `round`.
  DPT_DEVICE bool has_room(uint32_t round, uint32_t peers) const {
    if (!has_peer(peers, peer_)) return true;
    const Control& control = control_of(group_, group_.rank);
    const uint32_t taken = load_acquire(&control.taken[channel_index()][lane_][peer_]);
    return mine_ + round - taken < static_cast<uint32_t>(kNumSlots);
  }
  DPT_DEVICE uint4* slot(int peer, uint32_t round) const {
    return slot_at(group_, peer, lane_, group_.rank, first_.of[peer] + round);
  }
  DPT_DEVICE void publish(uint32_t round, uint32_t peers) const {
    if (!has_peer(peers, peer_)) return;
    Control& control = control_of(group_, peer_);
    store_release(&control.arrived[channel_index()][lane_][group_.rank], mine_ + round + 1);
  }
  DPT_DEVICE int peer() const { return peer_; }
  // Keeps the books for the next kernel.
  DPT_DEVICE void close(uint32_t rounds) const {
    if (peer_ >= 0) count() = mine_ + rounds;
  }

 private:
  DPT_DEVICE uint32_t& count() const {
    return counters_of(group_).sent[channel_index()][lane_][peer_];
  }

  const GroupView& group_;
  Lane lane_;
  FirstChunks& first_;
  int peer_;  // whose books this thread keeps; -1: nobody's
  uint32_t mine_ = 0;
};

class Receiver {
 public:
  DPT_DEVICE Receiver(const GroupView& group, Lane lane, QueueEnds& ends, const Team& team)
      : group_(group), lane_(lane), first_(ends.receiver[lane]), peer_(team.clerk_peer()) {
    if (peer_ >= 0) first_.of[peer_] = mine_ = count();
  }

  // Whether this thread's peer has sent the chunk of `round`.
  DPT_DEVICE bool has_come(uint32_t round, uint32_t peers) const {
    if (!has_peer(peers, peer_)) return true;
    const Control& control = control_of(group_, group_.rank);
    const uint32_t arrived = load_acquire(&control.arrived[channel_index()][lane_][peer_]);
    return static_cast<int32_t>(arrived - (mine_ + round)) > 0;
  }
  DPT_DEVICE const uint4* slot(int peer, uint32_t round) const {
    return slot_at(group_, group_.rank, lane_, peer, first_.of[peer] + round);
  }
  DPT_DEVICE void release(uint32_t round, uint32_t peers) const {
    if (!has_peer(peers, peer_)) return;
    Control& control = control_of(group_, peer_);
    // What was read is in registers by now; there is nothing that a fence would have to wait for.
    store_relaxed(&control.taken[channel_index()][lane_][group_.rank], mine_ + round + 1);
  }
  DPT_DEVICE int peer() const { return peer_; }
  DPT_DEVICE void close(uint32_t rounds) const {
    if (peer_ >= 0) count() = mine_ + rounds;
  }

 private:
  DPT_DEVICE uint32_t& count() const {
    return counters_of(group_).received[channel_index()][lane_][peer_];
  }

  const GroupView& group_;
  Lane lane_;
  FirstChunks& first_;
  int peer_;  // whose books this thread keeps; -1: nobody's
  uint32_t mine_ = 0;
};

// What the teams of a kernel share.
template <int kTeams>
struct PipelineState {
  QueueEnds ends;
  Progress progress[kTeams];

  // All threads of the channel, before the first team begins.
  DPT_DEVICE void start() {
    if (thread_index() < kTeams) progress[thread_index()] = {};
    sync_channel();
  }
};

}  // namespace dpt::cuda
