// Packets say themselves that they have arrived, so their data needs neither a signal behind it nor
// a fence before one. Eight neighbouring threads move a packet of 256 bytes: two lines, each
// written by one instruction of all eight. A line's last 8 bytes are the operation's number. Over
// NVLink such a line arrives whole. (The idea of NCCL's LL128 protocol.)
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

// Picks this thread's packets of a part. Every part is dealt out to the channels alike, and in them
// to warps. These take as many packets at a time as they have crews of eight.
//
// NOTE [Warps together] A warp goes through all of this in one piece. Crews whose packet lies
// behind the part's end send and receive an empty one. Were a line's eight threads ever apart, its
// number might be written before its data.
class PacketLoop {
 public:
  static constexpr uint32_t kCrews = kWarp / kLanes;

  DPT_DEVICE explicit PacketLoop(uint64_t bytes) {
    const auto count = static_cast<uint32_t>((bytes + kPacketData - 1) / kPacketData);
    share_ = (count + num_channels() - 1) / num_channels();
    share_ = (share_ + kCrews - 1) / kCrews * kCrews;
  }

  // Calls visit(packet of the part, packet of the channel) until one returns false.
  template <typename Visit>
  DPT_DEVICE bool each(Visit visit) const {
    const uint32_t crews = num_threads() / kLanes;
    const uint32_t crew = thread_index() / kLanes;
    for (uint32_t index = crew; index - crew % kCrews < share_; index += crews) {
      if (!visit(channel_index() * share_ + index, index)) return false;
    }
    return true;
  }

 private:
  uint32_t share_;  // of each channel, whole bundles
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

// The staging of one trip of a kernel's packets.
class Packets {
 public:
  DPT_DEVICE Packets(const GroupView& group, const CallView& call, int trip)
      : group_(group),
        call_(call),
        trip_(trip),
        sequence_(counters_of(group).packet_sequence[channel_index()] + 1) {}

  // The channel's packet `index` for `peer`. All of a warp together, as in `receive`.
  DPT_DEVICE void send(int peer, uint32_t index, const Share& share) const {
    uint4 first = to_uint4(share.of[0]);
    uint4 second = to_uint4(share.of[1]);
    if (lane() == kLanes - 1) {
      second = {first.z, first.w, sequence_, sequence_};
      first = {first.x, first.y, sequence_, sequence_};
    }
    uint4* const line = at(peer, group_.rank, index);
    sync_warp();
    store_lane(line, first);
    store_lane(line + kLanes, second);
  }

  // Waits for that packet of every peer; shares[peer] is set. False when the group failed.
  template <int kRanks>
  DPT_DEVICE bool receive(uint32_t index, Share (&shares)[kRanks]) const {
    const bool last = lane() == kLanes - 1;
    int missing = 0;
    for (Patience patience;;) {
      sync_warp();
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer >= group_.layout.size || peer == group_.rank) continue;
        const uint4* const line = at(group_.rank, peer, index);
        shares[peer].of[0] = to_vector(load_lane(line));
        shares[peer].of[1] = to_vector(load_lane(line + kLanes));
      }
      bool all = true;
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer >= group_.layout.size || peer == group_.rank) continue;
        const Vector* const lines = shares[peer].of;
        if (last && (lines[0].word[3] != sequence_ || lines[1].word[3] != sequence_)) {
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

  // When all of the channel's packets of all trips are in: the next kernel uses the other copy.
  DPT_DEVICE void close() const {
    if (thread_index() == 0) counters_of(group_).packet_sequence[channel_index()] = sequence_;
  }

 private:
  // This thread's vector of the packet's first line.
  DPT_DEVICE uint4* at(int owner, int from, uint32_t index) const {
    const Layout& layout = group_.layout;
    const uint32_t copy = (sequence_ & 1) * kNumTrips + trip_;
    const uint32_t area = (copy * layout.channels + channel_index()) * layout.size + from;
    return reinterpret_cast<uint4*>(group_.blocks[owner] + layout.packets_offset() +
                                    size_t{area} * layout.packet_bytes) +
           index * (2 * kLanes) + lane();
  }

  const GroupView& group_;
  const CallView& call_;
  int trip_;
  uint32_t sequence_;
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
