// Packets say themselves that they have arrived, so their data needs neither a signal behind it nor
// a fence before one. Eight neighbouring threads move a packet of 256 bytes: two lines, each
// written by one instruction of all eight, whose last 8 bytes are the packet's number. Over NVLink
// such a line arrives whole. (The idea of NCCL's LL128 protocol.)
//
//   line 0:  vectors 0 to 6     first half of vector 14     number
//   line 1:  vectors 7 to 13    second half of vector 14    number
//
// A thread's share is two vectors, k and 7 + k; the eighth thread's is vector 14 alone.
#pragma once

#include "cuda/vectors.cuh"
#include "cuda/wait.cuh"

namespace dpt::cuda {

struct Share {
  Vector of[2];
};
DPT_DEVICE int lane() { return thread_index() % kLanes; }
// The position of this thread's vector k in its packet; the eighth thread has no second.
DPT_DEVICE uint32_t vector_of_share(int k) {
  return lane() == kLanes - 1 ? kVectorsPerPacket - 1 : lane() + k * (kLanes - 1);
}

DPT_DEVICE int crew_index() { return thread_index() / kLanes; }

// Which packets of a part are this crew's: every part is dealt out to the channels alike, and in
// them to warps, which take as many packets at a time as they have crews.
//
// NOTE [Warps together] A warp goes through all of this in one piece: crews whose packet lies
// behind the part's end send and receive an empty one. Were a line's eight threads ever apart, its
// number might be written before its data.
//
// NOTE [Packets ahead] Nobody says that a packet was taken. Who sends packet n has waited for every
// peer's packet n - a - 1, where a is how many go ahead, and each peer had by then taken everything
// up to n - 2a - 2. A ring of 2 (a + 1) packets is therefore enough, for data of any size. It is so
// from one kernel to the next as well, as the crew's count goes on: a peer that has sent the last
// packet of a kernel has at most a + 1 of them left to take, and a + 1 of the next kernel come
// before this rank waits for that peer again. Results are sent on their own ring by who waits for
// inputs, and taken a packets later: the same holds for them.
class PacketLoop {
 public:
  DPT_DEVICE explicit PacketLoop(uint64_t bytes) {
    constexpr uint32_t kCrewsOfWarp = kWarp / kLanes;
    const auto count = static_cast<uint32_t>((bytes + kPacketData - 1) / kPacketData);
    const uint32_t of_channel = (count + num_channels() - 1) / num_channels();
    const uint32_t share = (of_channel + kCrewsOfWarp - 1) / kCrewsOfWarp * kCrewsOfWarp;
    crews_ = num_threads() / kLanes;
    first_ = channel_index() * share + crew_index();
    const uint32_t taken = crew_index() / kCrewsOfWarp * kCrewsOfWarp;  // by the warps before
    steps_ = taken < share ? (share - taken + crews_ - 1) / crews_ : 0;
  }

  // How many packets of a part are this crew's; the same for all of a warp.
  DPT_DEVICE uint32_t steps() const { return steps_; }

  // Calls each stage with (packet of the part, step) for all steps, a later stage kPacketsAhead
  // steps behind the one before it, until one returns false.
  template <typename... Stages>
  DPT_DEVICE bool run(Stages... stages) const {
    const uint32_t ahead = steps_ <= kPacketsAhead ? steps_ - 1 : kPacketsAhead;
    const uint32_t end = steps_ == 0 ? 0 : steps_ + ahead * (sizeof...(stages) - 1);
    for (uint32_t turn = 0; turn < end; ++turn) {
      bool ok = true;
      uint32_t step = turn;  // before a stage's first it is below 0, so very large
      ((ok = ok && (step >= steps_ || stages(first_ + step * crews_, step)), step -= ahead), ...);
      if (!ok) return false;
    }
    return true;
  }

 private:
  uint32_t first_;
  uint32_t crews_;
  uint32_t steps_;
};

// This thread's share of a packet of the caller's memory. Plain memory is aligned to vectors; there
// the last vector is read whole, since memory that has its first byte has all of it.
template <bool kPlain>
DPT_DEVICE Share load_share(const char* part, uint64_t bytes, uint32_t packet) {
  Share share{};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (k == 1 && lane() == kLanes - 1) continue;
    const uint64_t at =
        (uint64_t{packet} * kVectorsPerPacket + vector_of_share(k)) * Vector::kBytes;
    if (at >= bytes) continue;
    share.of[k] = kPlain ? *reinterpret_cast<const Vector*>(part + at)
                         : load_user<Vector>(part + at, bytes - at);
  }
  return share;
}
DPT_DEVICE void store_share(char* part, uint64_t bytes, uint32_t packet, const Share& share) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (k == 1 && lane() == kLanes - 1) continue;
    const uint64_t at =
        (uint64_t{packet} * kVectorsPerPacket + vector_of_share(k)) * Vector::kBytes;
    if (at < bytes) store_user(part + at, share.of[k], bytes - at);
  }
}

// The rings of one trip of a kernel's packets.
class Packets {
 public:
  DPT_DEVICE Packets(const GroupView& group, const CallView& call, int trip)
      : group_(group), call_(call), trip_(trip), sent_(*count()) {}

  // This crew's packet of `step` for `peer`. All of a warp together, as in `receive`.
  DPT_DEVICE void send(int peer, uint32_t step, const Share& share) const {
    const uint32_t number = sent_ + 1 + step;
    uint4 first = to_uint4(share.of[0]);
    uint4 second = to_uint4(share.of[1]);
    if (lane() == kLanes - 1) {
      second = {first.z, first.w, number, number};
      first = {first.x, first.y, number, number};
    }
    uint4* const line = at(peer, group_.rank, number);
    sync_warp();
    store_lane(line, first);
    store_lane(line + kLanes, second);
  }

  // Waits for that packet of every peer; shares[peer] is set. False when the group failed.
  template <int kRanks>
  DPT_DEVICE bool receive(uint32_t step, Share (&shares)[kRanks]) const {
    const uint32_t number = sent_ + 1 + step;
    const bool last = lane() == kLanes - 1;
    int missing = 0;
    for (Patience patience;;) {
      sync_warp();
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer >= group_.layout.size || peer == group_.rank) continue;
        const uint4* const line = at(group_.rank, peer, number);
        shares[peer].of[0] = to_vector(load_lane(line));
        shares[peer].of[1] = to_vector(load_lane(line + kLanes));
      }
      bool all = true;
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer >= group_.layout.size || peer == group_.rank) continue;
        const Vector* const lines = shares[peer].of;
        if (last && (lines[0].word[3] != number || lines[1].word[3] != number)) {
          all = false;
          missing = peer;
        }
      }
      if (warp_and(all)) break;
      if (!warp_and(!last || !patience.is_over(group_, call_, missing))) return false;
    }
#pragma unroll
    for (int peer = 0; peer < kRanks; ++peer) {
      Vector& first = shares[peer].of[0];
      const Vector& second = shares[peer].of[1];
      first.word[2] = last ? second.word[0] : first.word[2];
      first.word[3] = last ? second.word[1] : first.word[3];
    }
    return true;
  }

  // At the kernel's end.
  DPT_DEVICE void close(const PacketLoop& loop) const {
    if (lane() == 0) *count() = sent_ + loop.steps();
  }

 private:
  DPT_DEVICE uint32_t* count() const {
    return &counters_of(group_).packets[trip_][channel_index()][crew_index()];
  }
  // This thread's vector of the packet's first line. Packets that a warp moves at a time lie side
  // by side.
  DPT_DEVICE uint4* at(int owner, int from, uint32_t number) const {
    const Layout& layout = group_.layout;
    const uint32_t ring = (trip_ * layout.channels + channel_index()) * layout.size + from;
    const uint32_t packet =
        (ring * kPacketRing + number % kPacketRing) * layout.packet_crews + crew_index();
    return reinterpret_cast<uint4*>(group_.blocks[owner] + layout.packets_offset()) +
           size_t{packet} * (2 * kLanes) + lane();
  }

  const GroupView& group_;
  const CallView& call_;
  int trip_;
  uint32_t sent_;  // packets, in kernels before this one
};

template <typename VectorReducer>
DPT_DEVICE Share scale_share(const Share& share, const Scale& scale) {
  if (scale.input == 1) return share;
  return {{VectorReducer::scale_input(share.of[0], scale),
           VectorReducer::scale_input(share.of[1], scale)}};
}

// The peers' shares and the own one, reduced in rank order.
template <typename VectorReducer, int kRanks>
DPT_DEVICE Share reduce_shares(const GroupView& group,
                               const Share (&peers)[kRanks],
                               const Share& own,
                               const Scale& scale) {
  Share result;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    VectorReducer reducer;
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (source >= group.layout.size) continue;
      reducer.add(pick(source == group.rank, own.of[k], peers[source].of[k]));
    }
    result.of[k] = reducer.result(scale);
  }
  return result;
}

}  // namespace dpt::cuda
