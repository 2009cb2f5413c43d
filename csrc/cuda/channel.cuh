// A channel's queues to and from its peers: chunks of up to slot_bytes, pushed into the receiver's
// memory.
//
// All threads of the channel call each function together. Thread p keeps the books for peer p: it
// waits for that peer and signals it, while all threads move the data.
//
// To send:     reserve -> write to outgoing(peer) -> publish
// To receive:  await   -> read incoming(peer)     -> release
#pragma once

#include "cuda/wait.cuh"

namespace dpt::cuda {

// Where the current chunk of each queue lies, for all threads.
struct ChannelShared {
  uint32_t outgoing[kNumLanes][kMaxRanks];
  uint32_t incoming[kNumLanes][kMaxRanks];
};

class Channel {
 public:
  DPT_DEVICE Channel(const GroupView& group, const CallView& call, ChannelShared& shared)
      : group_(group), call_(call), shared_(shared), peer_(thread_index()) {
    if (!keeps_books()) return;
    const Counters& counters = counters_of(group_);
    for (int lane = 0; lane < kNumLanes; ++lane) {
      sent_[lane] = counters.sent[channel_index()][lane][peer_];
      received_[lane] = counters.received[channel_index()][lane][peer_];
    }
  }

  DPT_DEVICE uint32_t all_peers() const {
    return ((1u << group_.layout.size) - 1) & ~(1u << group_.rank);
  }

  // Waits until the queue to each of `peers` (bits) has room for one more chunk.
  DPT_DEVICE bool reserve(Lane lane, uint32_t peers) {
    bool ok = true;
    if (keeps_books_of(peers)) {
      const uint32_t* taken = &control_of(group_, group_.rank).taken[channel_index()][lane][peer_];
      ok = wait_until(group_, call_, peer_, [&] {
        return sent_[lane] - load_acquire(taken) < static_cast<uint32_t>(kNumSlots);
      });
      shared_.outgoing[lane][peer_] = sent_[lane] % kNumSlots;
    }
    return sync_channel_and(ok);
  }
  DPT_DEVICE uint4* outgoing(Lane lane, int peer) const {
    return slot(peer, lane, group_.rank, shared_.outgoing[lane][peer]);
  }
  DPT_DEVICE void publish(Lane lane, uint32_t peers) {
    sync_channel();
    if (!keeps_books_of(peers)) return;
    ++sent_[lane];
    store_release(&control_of(group_, peer_).arrived[channel_index()][lane][group_.rank],
                  sent_[lane]);
  }

  // Waits for the next chunk of each of `peers`.
  DPT_DEVICE bool await(Lane lane, uint32_t peers) {
    bool ok = true;
    if (keeps_books_of(peers)) {
      const uint32_t* arrived =
          &control_of(group_, group_.rank).arrived[channel_index()][lane][peer_];
      ok = wait_until(
          group_, call_, peer_, [&] { return load_acquire(arrived) != received_[lane]; });
      shared_.incoming[lane][peer_] = received_[lane] % kNumSlots;
    }
    return sync_channel_and(ok);
  }
  DPT_DEVICE const uint4* incoming(Lane lane, int peer) const {
    return slot(group_.rank, lane, peer, shared_.incoming[lane][peer]);
  }
  DPT_DEVICE void release(Lane lane, uint32_t peers) {
    sync_channel();
    if (!keeps_books_of(peers)) return;
    ++received_[lane];
    store_release(&control_of(group_, peer_).taken[channel_index()][lane][group_.rank],
                  received_[lane]);
  }

  // Keeps the books for the next kernel.
  DPT_DEVICE void close() const {
    if (!keeps_books()) return;
    Counters& counters = counters_of(group_);
    for (int lane = 0; lane < kNumLanes; ++lane) {
      counters.sent[channel_index()][lane][peer_] = sent_[lane];
      counters.received[channel_index()][lane][peer_] = received_[lane];
    }
  }

 private:
  DPT_DEVICE bool keeps_books() const { return peer_ < group_.layout.size && peer_ != group_.rank; }
  DPT_DEVICE bool keeps_books_of(uint32_t peers) const {
    return keeps_books() && (peers >> peer_ & 1) != 0;
  }
  // In `owner`'s block, of the queue that `from` fills.
  DPT_DEVICE uint4* slot(int owner, Lane lane, int from, uint32_t index) const {
    const Layout& layout = group_.layout;
    const size_t queue =
        (static_cast<size_t>(lane) * kMaxChannels + channel_index()) * layout.size + from;
    return reinterpret_cast<uint4*>(group_.blocks[owner] + layout.slots_offset() +
                                    (queue * kNumSlots + index) * layout.slot_bytes);
  }

  const GroupView& group_;
  const CallView& call_;
  ChannelShared& shared_;
  int peer_;
  uint32_t sent_[kNumLanes] = {};
  uint32_t received_[kNumLanes] = {};
};

}  // namespace dpt::cuda
