// A channel's queues to and from its peers: chunks of up to slot_bytes, pushed into the receiver's
// memory. Thread p of a team's clerk keeps the books of the queue with peer p; workers see only
// slots. The queues of a lane are those of PeerLinks or of RingLinks.
//
// Sender:    has_room -> workers write to slot(queue) -> publish
// Receiver:  has_come -> workers read slot(queue)     -> release
#pragma once

#include "cuda/team.cuh"

namespace dpt::cuda {

// The number of the kernel's first chunk in each queue, for all threads of a team.
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

DPT_DEVICE int rank_after(const GroupView& group) { return (group.rank + 1) % group.layout.size; }
DPT_DEVICE int rank_before(const GroupView& group) {
  return (group.rank + group.layout.size - 1) % group.layout.size;
}

// A queue with each peer, under its number; at the other end it has this rank's.
struct PeerLinks {
  DPT_DEVICE static int kept_by_sender(const GroupView&, const Team& team) {
    return team.clerk_peer();
  }
  DPT_DEVICE static int kept_by_receiver(const GroupView&, const Team& team) {
    return team.clerk_peer();
  }
  DPT_DEVICE static int receiver_of(const GroupView&, int queue) { return queue; }
  DPT_DEVICE static int sender_of(const GroupView&, int queue) { return queue; }
  DPT_DEVICE static int number_there(const GroupView& group, int) { return group.rank; }
};
// Queues from the rank before and to the rank after, one for what began its way at each rank, under
// that rank's number at both ends. A team has to do with one of them.
struct RingLinks {
  int origin;
  DPT_DEVICE int kept_by_sender(const GroupView& group, const Team& team) const {
    return team.clerk_peer() == rank_after(group) ? origin : -1;
  }
  DPT_DEVICE int kept_by_receiver(const GroupView& group, const Team& team) const {
    return team.clerk_peer() == rank_before(group) ? origin : -1;
  }
  DPT_DEVICE static int receiver_of(const GroupView& group, int) { return rank_after(group); }
  DPT_DEVICE static int sender_of(const GroupView& group, int) { return rank_before(group); }
  DPT_DEVICE static int number_there(const GroupView&, int queue) { return queue; }
};

// In `owner`'s block, of this channel's queue of that number there.
DPT_DEVICE uint4* slot_at(
    const GroupView& group, int owner, Lane lane, int number, uint32_t chunk) {
  const Layout& layout = group.layout;
  const uint32_t queue = (lane * layout.channels + channel_index()) * layout.size + number;
  const size_t at = size_t{queue * kNumSlots + chunk % kNumSlots} * layout.slot_bytes;
  return reinterpret_cast<uint4*>(group.blocks[owner] + layout.slots_offset() + at);
}

// Of the queues in `active`, as bits.
template <typename Links = PeerLinks>
class Sender {
 public:
  DPT_DEVICE Sender(
      const GroupView& group, Lane lane, QueueEnds& ends, const Team& team, Links links = {})
      : group_(group),
        links_(links),
        lane_(lane),
        first_(ends.sender[lane]),
        kept_(links.kept_by_sender(group, team)) {
    if (kept_ >= 0) first_.of[kept_] = mine_ = count();
  }

  // Whether the queue that this thread keeps has room for the chunk of `round`.
  DPT_DEVICE bool has_room(uint32_t round, uint32_t active) const {
    if (!has_peer(active, kept_)) return true;
    const Control& control = control_of(group_, group_.rank);
    const uint32_t taken = load_acquire(&control.taken[channel_index()][lane_][kept_]);
    return mine_ + round - taken < static_cast<uint32_t>(kNumSlots);
  }
  DPT_DEVICE uint4* slot(int queue, uint32_t round) const {
    return slot_at(group_,
                   links_.receiver_of(group_, queue),
                   lane_,
                   links_.number_there(group_, queue),
                   first_.of[queue] + round);
  }
  DPT_DEVICE void publish(uint32_t round, uint32_t active) const {
    if (!has_peer(active, kept_)) return;
    Control& control = control_of(group_, links_.receiver_of(group_, kept_));
    const int number = links_.number_there(group_, kept_);
    store_release(&control.arrived[channel_index()][lane_][number], mine_ + round + 1);
  }
  // The queue whose books this thread keeps; -1: none.
  DPT_DEVICE int kept() const { return kept_; }
  // Keeps the books for the next kernel.
  DPT_DEVICE void close(uint32_t rounds) const {
    if (kept_ >= 0) count() = mine_ + rounds;
  }

 private:
  DPT_DEVICE uint32_t& count() const {
    return counters_of(group_).sent[channel_index()][lane_][kept_];
  }

  const GroupView& group_;
  Links links_;
  Lane lane_;
  FirstChunks& first_;
  int kept_;
  uint32_t mine_ = 0;
};

template <typename Links = PeerLinks>
class Receiver {
 public:
  DPT_DEVICE Receiver(
      const GroupView& group, Lane lane, QueueEnds& ends, const Team& team, Links links = {})
      : group_(group),
        links_(links),
        lane_(lane),
        first_(ends.receiver[lane]),
        kept_(links.kept_by_receiver(group, team)) {
    if (kept_ >= 0) first_.of[kept_] = mine_ = count();
  }

  // Whether the chunk of `round` has come in the queue that this thread keeps.
  DPT_DEVICE bool has_come(uint32_t round, uint32_t active) const {
    if (!has_peer(active, kept_)) return true;
    const Control& control = control_of(group_, group_.rank);
    const uint32_t arrived = load_acquire(&control.arrived[channel_index()][lane_][kept_]);
    return static_cast<int32_t>(arrived - (mine_ + round)) > 0;
  }
  DPT_DEVICE const uint4* slot(int queue, uint32_t round) const {
    return slot_at(group_, group_.rank, lane_, queue, first_.of[queue] + round);
  }
  DPT_DEVICE void release(uint32_t round, uint32_t active) const {
    if (!has_peer(active, kept_)) return;
    Control& control = control_of(group_, links_.sender_of(group_, kept_));
    const int number = links_.number_there(group_, kept_);
    // What was read is in registers by now; there is nothing that a fence would have to wait for.
    store_relaxed(&control.taken[channel_index()][lane_][number], mine_ + round + 1);
  }
  DPT_DEVICE int kept() const { return kept_; }
  DPT_DEVICE void close(uint32_t rounds) const {
    if (kept_ >= 0) count() = mine_ + rounds;
  }

 private:
  DPT_DEVICE uint32_t& count() const {
    return counters_of(group_).received[channel_index()][lane_][kept_];
  }

  const GroupView& group_;
  Links links_;
  Lane lane_;
  FirstChunks& first_;
  int kept_;
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
