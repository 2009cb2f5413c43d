// A channel's queues to and from its peers: chunks of up to slot_bytes, pushed into the receiver's
// memory.
//
// One team owns each end. All its threads call each function together; thread p keeps the books for
// peer p: it waits for that peer and signals it, while all threads move the data.
//
// Sender:    reserve -> write to slot(peer) -> publish
// Receiver:  await   -> read slot(peer)     -> release
#pragma once

#include "cuda/team.cuh"
#include "cuda/wait.cuh"

namespace dpt::cuda {

// Where the current chunk for or from each peer lies, for all threads of the team.
struct CurrentSlots {
  uint32_t index[kMaxRanks];
};
// Of all the ends of a kernel's queues.
struct QueueEnds {
  CurrentSlots sender[kNumLanes];
  CurrentSlots receiver[kNumLanes];
};

DPT_DEVICE uint32_t all_peers(const GroupView& group) {
  return ((1u << group.layout.size) - 1) & ~(1u << group.rank);
}

// In `owner`'s block, of this channel's queue that `from` fills.
DPT_DEVICE uint4* slot_at(const GroupView& group, int owner, Lane lane, int from, uint32_t index) {
  const Layout& layout = group.layout;
  const uint32_t queue = (lane * kMaxChannels + channel_index()) * layout.size + from;
  const size_t at = size_t{queue * kNumSlots + index} * layout.slot_bytes;
  return reinterpret_cast<uint4*>(group.blocks[owner] + layout.slots_offset() + at);
}

class Sender {
 public:
  DPT_DEVICE Sender(
      const GroupView& group, const CallView& call, const Team& team, Lane lane, QueueEnds& ends)
      : group_(group), call_(call), team_(team), lane_(lane), slots_(ends.sender[lane]) {
    if (keeps_books_of(all_peers(group))) sent_ = count();
  }

  // Waits until the queue to each of `peers` (bits) has room for one more chunk.
  DPT_DEVICE bool reserve(uint32_t peers) {
    bool ok = true;
    const int peer = team_.thread();
    if (keeps_books_of(peers)) {
      const uint32_t* taken = &control_of(group_, group_.rank).taken[channel_index()][lane_][peer];
      ok = wait_until(group_, call_, peer, [&] {
        return sent_ - load_acquire(taken) < static_cast<uint32_t>(kNumSlots);
      });
      slots_.index[peer] = sent_ % kNumSlots;
    }
    return team_.sync_and(ok);
  }
  DPT_DEVICE uint4* slot(int peer) const {
    return slot_at(group_, peer, lane_, group_.rank, slots_.index[peer]);
  }
  DPT_DEVICE void publish(uint32_t peers) {
    team_.sync();
    if (!keeps_books_of(peers)) return;
    const int peer = team_.thread();
    ++sent_;
    store_release(&control_of(group_, peer).arrived[channel_index()][lane_][group_.rank], sent_);
  }

  // Keeps the books for the next kernel.
  DPT_DEVICE void close() const {
    if (keeps_books_of(all_peers(group_))) count() = sent_;
  }

 private:
  DPT_DEVICE bool keeps_books_of(uint32_t peers) const {
    return team_.thread() < group_.layout.size && (peers >> team_.thread() & 1) != 0;
  }
  DPT_DEVICE uint32_t& count() const {
    return counters_of(group_).sent[channel_index()][lane_][team_.thread()];
  }

  const GroupView& group_;
  const CallView& call_;
  const Team& team_;
  Lane lane_;
  CurrentSlots& slots_;
  uint32_t sent_ = 0;
};

class Receiver {
 public:
  DPT_DEVICE Receiver(
      const GroupView& group, const CallView& call, const Team& team, Lane lane, QueueEnds& ends)
      : group_(group), call_(call), team_(team), lane_(lane), slots_(ends.receiver[lane]) {
    if (keeps_books_of(all_peers(group))) received_ = count();
  }

  // Waits for the next chunk of each of `peers` (bits).
  DPT_DEVICE bool await(uint32_t peers) {
    bool ok = true;
    const int peer = team_.thread();
    if (keeps_books_of(peers)) {
      const uint32_t* arrived =
          &control_of(group_, group_.rank).arrived[channel_index()][lane_][peer];
      ok = wait_until(group_, call_, peer, [&] { return load_acquire(arrived) != received_; });
      slots_.index[peer] = received_ % kNumSlots;
    }
    return team_.sync_and(ok);
  }
  DPT_DEVICE const uint4* slot(int peer) const {
    return slot_at(group_, group_.rank, lane_, peer, slots_.index[peer]);
  }
  DPT_DEVICE void release(uint32_t peers) {
    team_.sync();
    if (!keeps_books_of(peers)) return;
    const int peer = team_.thread();
    ++received_;
    // What was read is in registers by now; there is nothing that a fence would have to wait for.
    store_relaxed(&control_of(group_, peer).taken[channel_index()][lane_][group_.rank], received_);
  }

  DPT_DEVICE void close() const {
    if (keeps_books_of(all_peers(group_))) count() = received_;
  }

 private:
  DPT_DEVICE bool keeps_books_of(uint32_t peers) const {
    return team_.thread() < group_.layout.size && (peers >> team_.thread() & 1) != 0;
  }
  DPT_DEVICE uint32_t& count() const {
    return counters_of(group_).received[channel_index()][lane_][team_.thread()];
  }

  const GroupView& group_;
  const CallView& call_;
  const Team& team_;
  Lane lane_;
  CurrentSlots& slots_;
  uint32_t received_ = 0;
};

}  // namespace dpt::cuda
