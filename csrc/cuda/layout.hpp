// The memory that the GPUs of a group share, as kernels and host code see it.
//
// Each rank owns one block of device memory that its peers map too. A block holds, in this order:
//   control   flags that the peers set
//   counters  this rank's own bookkeeping, kept from kernel to kernel
//   lines     staging of low-latency kernels: data that carries its flags with it
//   packets   the same in larger units, for messages of middle size
//   slots     staging of push kernels: a short queue of chunks from every peer
//
// NOTE [Device sequence] Flags, counters and the parity of staging live in device memory and are
// advanced by the kernels alone. So calls, and replays of any number of captured graphs, mix on one
// group in whatever order the stream runs them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/plan.hpp"

namespace dpt::cuda {

constexpr int kMaxRanks = 8;
// A channel is one thread block and its counterparts on the peers; each works by itself.
constexpr int kMaxChannels = 64;
constexpr int kMostThreads = 512;
// Queues of a channel. A kernel that sends results while it still receives inputs uses both of the
// first; what goes round the ring has queues of its own.
enum Lane : int { kInputs = 0, kResults = 1, kRing = 2 };
constexpr int kNumLanes = 3;
constexpr int kNumSlots = 4;  // chunks a queue holds
// Threads that move a packet together, and what it holds. A kernel's results travel apart from its
// inputs, on a trip of their own.
constexpr int kLanes = 8;
constexpr int kVectorsPerPacket = 15;
constexpr uint32_t kPacketData = 240;
constexpr uint32_t kPacketBytes = 256;
constexpr int kNumTrips = 2;

constexpr size_t kAlignment = 128;
// An output that begins within one takes no landing (landing.cuh).
constexpr uint64_t kLandingUnit = 16;

// Why a group failed on the device. Host memory that the device writes, and reads where it waits.
struct HostStatus {
  enum Code : uint32_t { kNone = 0, kTimeout, kMismatch, kAborted };
  uint32_t abort;     // not 0: kernels give up
  uint32_t released;  // not 0: kernels that gave up end
  uint32_t code;      // of the first kernel that gave up by itself; written last
  uint32_t peer;      // the rank it waited for
  uint32_t sequence;  // the native operation's number in this group
};

struct Control {
  // By the rank that sends, for each of this rank's queues (queue.cuh): chunks sent so far.
  uint32_t arrived[kMaxChannels][kNumLanes][kMaxRanks];
  // By the rank that receives, for each queue there that this rank fills: chunks taken so far.
  uint32_t taken[kMaxChannels][kNumLanes][kMaxRanks];
  // By the rank that receives, for each queue there that this rank fills: a Landing.
  uint64_t landing[kMaxChannels][kNumLanes][kMaxRanks];
  // By the rank that sends, for each of this rank's queues: the first chunk that went there.
  uint32_t landed_from[kMaxChannels][kNumLanes][kMaxRanks];
  // The operation that each rank last entered: its description above its number. Twice, since a
  // peer may be one operation ahead.
  uint64_t entered[2][kMaxRanks];
};

struct Counters {
  uint32_t sent[kMaxChannels][kNumLanes][kMaxRanks];
  uint32_t received[kMaxChannels][kNumLanes][kMaxRanks];
  uint32_t line_sequence[kMaxChannels];    // of the channel's last low-latency kernel
  uint32_t packet_sequence[kMaxChannels];  // of the channel's last kernel with packets
  uint32_t sequence;                       // of the group's last native operation
  uint32_t failed;                         // kernels that start now end at once
};

// Sizes that all ranks of a group agree on.
struct Layout {
  int size;               // ranks
  int channels;           // most of a kernel
  uint32_t slot_bytes;    // of one chunk, a multiple of kAlignment
  uint32_t line_bytes;    // of one channel's data from one rank; a line holds half data, half flags
  uint32_t packet_bytes;  // of one channel's packets from one rank, on one trip; 0: none

  // `packets`: whether the links deliver their lines whole.
  static constexpr Layout of(int size,
                             uint32_t slot_bytes,
                             int channels = kMaxChannels,
                             bool packets = true) {
    // Messages in lines are small, those in packets end where chunks begin to pay.
    const uint32_t count = packets ? slot_bytes * 9 / 8 / kPacketBytes / 4 * 4 : 0;
    return {size, channels, slot_bytes, slot_bytes / 4, count * kPacketBytes};
  }

  static constexpr size_t round(size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  static constexpr size_t counters_offset() { return round(sizeof(Control)); }
  static constexpr size_t lines_offset() { return counters_offset() + round(sizeof(Counters)); }
  constexpr size_t lines_bytes() const {
    return size_t{2} * channels * size * (2 * size_t{line_bytes});
  }
  constexpr size_t packets_offset() const { return lines_offset() + lines_bytes(); }
  constexpr size_t packets_bytes() const {
    return size_t{2} * kNumTrips * channels * size * packet_bytes;
  }
  constexpr size_t slots_offset() const { return packets_offset() + packets_bytes(); }
  constexpr size_t slots_bytes() const {
    return size_t{kNumLanes} * channels * size * kNumSlots * slot_bytes;
  }
  constexpr size_t block_bytes() const { return slots_offset() + slots_bytes(); }
};

// The longest part that low-latency kernels take: each thread of the grid has the same number of
// lines.
constexpr uint64_t most_in_lines(const Layout& layout, const Grid& grid) {
  constexpr uint64_t kDataPerLine = 8;
  const uint64_t per_thread = layout.line_bytes / kDataPerLine / grid.threads;
  return per_thread * grid.threads * grid.channels * kDataPerLine;
}

// The longest part that kernels with packets take.
constexpr uint64_t most_in_packets(const Layout& layout, const Grid& grid) {
  return uint64_t{layout.packet_bytes / kPacketBytes} * static_cast<uint64_t>(grid.channels) *
         kPacketData;
}

// How links join the GPUs of a group; the same on every rank.
enum class Wiring {
  kAlike,    // each two in the same way
  kUnequal,  // each two, some better than others
  kPartial,  // some two don't reach each other's memory, but all are reached by way of others
};

// A group as its kernels get it.
struct GroupView {
  Layout layout;
  int rank;
  char* blocks[kMaxRanks];  // every rank's block where it is mapped here; nullptr: nowhere
  char* pools[kMaxRanks];   // where every rank's registered memory is mapped here; nullptr: nowhere
  uint32_t neighbours;      // ranks whose blocks are mapped here and who map this one's, as bits
  HostStatus* status;
};

// A launch adds this to the GroupView.
struct CallView {
  uint64_t timeout_ns;
  uint32_t description;  // equal on ranks that are in the same operation
  uint32_t landings;     // from which ranks, as bits, this rank's output can take chunks directly
};

}  // namespace dpt::cuda
