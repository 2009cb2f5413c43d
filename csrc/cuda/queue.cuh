// A channel's queues to and from its peers: chunks of up to slot_bytes, pushed into the receiver's
// memory: into slots, or where they belong if that is registered (landing.cuh). Thread p of a
// team's signal warp keeps the books of the queue with peer p; workers see only where a chunk lies.
// The queues of a lane are those of PeerLinks or of RingLinks. The round of a chunk is its number
// among the kernel's chunks in its queue. Kernels that don't use each queue once in every step
// count for themselves.
//
// Sender:                has_room -> workers write to slot(queue), or place(queue)   -> publish
// Receiver:  announce -> has_come -> workers read slot(queue), unless it has landed -> release
#pragma once

#include "cuda/landing.cuh"
#include "cuda/team.cuh"

namespace dpt::cuda {

// All threads of a team know this of its queues, in shared memory. A signal warp is rounds ahead of
// its workers: it may say from which later round on chunks land while they ask it of theirs.
struct ReceiverEnd {
  uint32_t first_chunk[kMaxRanks];  // of the kernel
  uint32_t lands_from[kMaxRanks];   // round
};
struct SenderEnd {
  uint32_t first_chunk[kMaxRanks];
  uint32_t lands_from[kMaxRanks];
  char* outputs[kMaxRanks];  // of the receivers, where chunks land
};
struct QueueEnds {
  SenderEnd sender[kNumLanes];
  ReceiverEnd receiver[kNumLanes];
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
    return team.signal_peer();
  }
  DPT_DEVICE static int kept_by_receiver(const GroupView&, const Team& team) {
    return team.signal_peer();
  }
  DPT_DEVICE static int receiver_of(const GroupView&, int queue) { return queue; }
  DPT_DEVICE static int sender_of(const GroupView&, int queue) { return queue; }
  DPT_DEVICE static int number_there(const GroupView& group, int) { return group.rank; }
};
// Queues from the rank before and to the rank after, one for the chunks that began their way at
// each rank. A queue has that rank's number at both ends. A team serves one of them.
struct RingLinks {
  int origin;
  DPT_DEVICE int kept_by_sender(const GroupView& group, const Team& team) const {
    return team.signal_peer() == rank_after(group) ? origin : -1;
  }
  DPT_DEVICE int kept_by_receiver(const GroupView& group, const Team& team) const {
    return team.signal_peer() == rank_before(group) ? origin : -1;
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

// Sends through the queues in `active`, given as bits.
template <typename Links = PeerLinks>
class Sender {
 public:
  DPT_DEVICE Sender(
      const GroupView& group, Lane lane, QueueEnds& ends, const Team& team, Links links = {})
      : group_(group),
        links_(links),
        lane_(lane),
        end_(ends.sender[lane]),
        kept_(links.kept_by_sender(group, team)) {
    if (kept_ < 0) return;
    end_.first_chunk[kept_] = mine_ = count();
    store_shared(&end_.lands_from[kept_], kNeverLands);
    const uint64_t old = load_relaxed(&landing());
    if (old != Landing::kNone && !Landing::is_for(old, mine_)) clear_relaxed(&landing(), old);
  }

  // Whether the queue that this thread keeps has room for the chunk of `round`, or needs none.
  DPT_DEVICE bool has_room(uint32_t round, uint32_t active) const {
    if (!has_peer(active, kept_) || lands(kept_, round)) return true;
    const uint64_t announced = load_relaxed(&landing());
    const Control& control = control_of(group_, group_.rank);
    const uint32_t taken = load_acquire(&control.taken[channel_index()][lane_][kept_]);
    if (Landing::is_for(announced, mine_)) return land_from(round), true;
    return mine_ + round - taken < static_cast<uint32_t>(kNumSlots);
  }
  // Whether the chunk goes to the receiver's output, of which nothing behind it may be touched.
  DPT_DEVICE bool lands(int queue, uint32_t round) const {
    return load_shared(&end_.lands_from[queue]) <= round;
  }
  // The place for the chunk that begins at byte `at` of the receiver's output.
  DPT_DEVICE uint4* place(int queue, uint32_t round, uint64_t at) const {
    if (lands(queue, round)) return reinterpret_cast<uint4*>(end_.outputs[queue] + at);
    return slot(queue, round);
  }
  DPT_DEVICE uint4* slot(int queue, uint32_t round) const {
    return slot_at(group_,
                   links_.receiver_of(group_, queue),
                   lane_,
                   links_.number_there(group_, queue),
                   end_.first_chunk[queue] + round);
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
  DPT_DEVICE uint64_t& landing() const {
    return control_of(group_, group_.rank).landing[channel_index()][lane_][kept_];
  }
  DPT_DEVICE void land_from(uint32_t round) const {
    const int receiver = links_.receiver_of(group_, kept_);
    // The receiver's writes before it come before what is written there now.
    const uint64_t offset = Landing::offset_of(load_acquire(&landing()));
    end_.outputs[kept_] = group_.pools[receiver] + offset;
    store_shared(&end_.lands_from[kept_], round);
    Control& control = control_of(group_, receiver);
    const int number = links_.number_there(group_, kept_);
    store_relaxed(&control.landed_from[channel_index()][lane_][number], mine_ + round);
  }

  const GroupView& group_;
  Links links_;
  Lane lane_;
  SenderEnd& end_;
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
        end_(ends.receiver[lane]),
        kept_(links.kept_by_receiver(group, team)) {
    if (kept_ < 0) return;
    end_.first_chunk[kept_] = mine_ = count();
    store_shared(&end_.lands_from[kept_], kNeverLands);
  }

  // Tells the sender where the queue that this thread keeps may put its chunks, of which there is
  // one at least: in `output`, if `call` allows that.
  DPT_DEVICE void announce(const CallView& call, const char* output) const {
    const int rank = group_.rank;
    if (!has_peer(call.landings, kept_)) return;
    store_shared(&end_.lands_from[kept_], kMayLand);
    store_relaxed(&landed_from(), mine_ - 1);  // none yet
    Control& control = control_of(group_, links_.sender_of(group_, kept_));
    const int number = links_.number_there(group_, kept_);
    store_release(&control.landing[channel_index()][lane_][number],
                  Landing::at(mine_, output - group_.pools[rank]));
  }

  // Whether the chunk of `round` has come in the queue that this thread keeps.
  DPT_DEVICE bool has_come(uint32_t round, uint32_t active) const {
    if (!has_peer(active, kept_)) return true;
    const Control& control = control_of(group_, group_.rank);
    const uint32_t arrived = load_acquire(&control.arrived[channel_index()][lane_][kept_]);
    if (static_cast<int32_t>(arrived - (mine_ + round)) <= 0) return false;
    if (load_shared(&end_.lands_from[kept_]) == kMayLand) {
      const uint32_t after = load_relaxed(&landed_from()) - mine_;
      if (static_cast<int32_t>(after) >= 0) store_shared(&end_.lands_from[kept_], after);
    }
    return true;
  }
  // Whether the chunk lies in the output already.
  DPT_DEVICE bool has_landed(int queue, uint32_t round) const {
    return load_shared(&end_.lands_from[queue]) <= round;
  }
  DPT_DEVICE const uint4* slot(int queue, uint32_t round) const {
    return slot_at(group_, group_.rank, lane_, queue, end_.first_chunk[queue] + round);
  }
  DPT_DEVICE void release(uint32_t round, uint32_t active) const {
    if (!has_peer(active, kept_)) return;
    Control& control = control_of(group_, links_.sender_of(group_, kept_));
    const int number = links_.number_there(group_, kept_);
    // The data read is in registers by now; there is nothing that a fence would have to wait for.
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
  DPT_DEVICE uint32_t& landed_from() const {
    return control_of(group_, group_.rank).landed_from[channel_index()][lane_][kept_];
  }

  const GroupView& group_;
  Links links_;
  Lane lane_;
  ReceiverEnd& end_;
  int kept_;
  uint32_t mine_ = 0;
};

// The teams of a kernel share this.
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
