// What a team does in a round: copy chunks, or reduce those of all ranks. A GPU's memory answers
// late, so a warp works in blocks and has the loads of its next block under way while it stores
// one.
#pragma once

#include "cuda/arguments.hpp"
#include "cuda/queue.cuh"
#include "cuda/vectors.cuh"

namespace dpt::cuda {

// This channel's chunk of each round of a part.
class ChunkOf {
 public:
  DPT_DEVICE explicit ChunkOf(const Cut& cut) : cut_(cut) {}
  DPT_DEVICE uint64_t offset(uint32_t round) const {
    return (static_cast<uint64_t>(round) * num_channels() + channel_index()) * cut_.chunk;
  }
  DPT_DEVICE uint32_t bytes(uint32_t round) const { return cut_.bytes_at(offset(round)); }

 private:
  const Cut& cut_;
};

// Vectors of each thread in a block.
constexpr int kCopyDepth = 4;
constexpr int kReduceDepth = 1;

// Calls load(item, block) and store(item, block) for the items of each of the team's warps, the
// loads one item ahead.
template <typename Block, typename Load, typename Store>
DPT_DEVICE void for_each_item(const Team& team, uint32_t items, Load load, Store store) {
  const uint32_t warps = team.num_threads() / kWarp;
  uint32_t item = team.thread() / kWarp;
  if (item >= items) return;
  Block block;
  load(item, block);
  for (;;) {
    const uint32_t next = item + warps;
    Block ahead;
    if (next < items) load(next, ahead);
    store(item, block);
    if (next >= items) return;
    block = ahead;
    item = next;
  }
}

// Of a thread in its warp's block.
template <int kDepth>
DPT_DEVICE uint32_t vector_index(uint32_t block, int k) {
  return (block * kDepth + k) * kWarp + thread_index() % kWarp;
}
DPT_DEVICE uint32_t num_vectors(uint32_t bytes) {
  return (bytes + Vector::kBytes - 1) / Vector::kBytes;
}
template <int kDepth>
DPT_DEVICE uint32_t num_blocks(uint32_t bytes) {
  return (num_vectors(bytes) + kDepth * kWarp - 1) / (kDepth * kWarp);
}
DPT_DEVICE bool is_aligned(uint64_t addresses) { return addresses % Vector::kBytes == 0; }

// Staging, which is always aligned, or the caller's memory. A vector that begins in either may be
// read whole.
DPT_DEVICE Vector load_any(const char* from, uint32_t valid) {
  if (is_aligned(address_of(from)))
    return to_vector(load_staged(reinterpret_cast<const uint4*>(from)));
  return load_slowly<Vector>(from, valid < Vector::kBytes ? valid : Vector::kBytes);
}

// One chunk on its way.
struct Transfer {
  const char* from;
  char* to;
  uint32_t bytes;
};
struct CopyBlock {
  Vector of[kCopyDepth];
};

// Copies transfer_of(0) ... transfer_of(count - 1), of which none has more than `most` bytes.
template <typename TransferOf>
DPT_DEVICE void copy_chunks(const Team& team,
                            uint32_t count,
                            uint32_t most,
                            TransferOf transfer_of) {
  const auto load = [&](uint32_t item, CopyBlock& block) {
    const Transfer transfer = transfer_of(item % count);
    if (!is_aligned(address_of(transfer.from))) return;
    const auto* const from = reinterpret_cast<const uint4*>(transfer.from);
#pragma unroll
    for (int k = 0; k < kCopyDepth; ++k) {
      const uint32_t i = vector_index<kCopyDepth>(item / count, k);
      if (i < num_vectors(transfer.bytes)) block.of[k] = to_vector(load_staged(from + i));
    }
  };
  const auto store = [&](uint32_t item, const CopyBlock& block) {
    const Transfer transfer = transfer_of(item % count);
    const bool loaded = is_aligned(address_of(transfer.from));
#pragma unroll
    for (int k = 0; k < kCopyDepth; ++k) {
      const uint32_t at = vector_index<kCopyDepth>(item / count, k) * Vector::kBytes;
      if (at >= transfer.bytes) continue;
      const uint32_t left = transfer.bytes - at;
      store_user(transfer.to + at, loaded ? block.of[k] : load_any(transfer.from + at, left), left);
    }
  };
  for_each_item<CopyBlock>(team, count * num_blocks<kCopyDepth>(most), load, store);
}

// Copies one chunk to every peer's slot, and reads it once.
template <int kRanks, typename SlotOf>
DPT_DEVICE void copy_chunk_to_all(
    const Team& team, const GroupView& group, const char* from, uint32_t bytes, SlotOf slot_of) {
  uint4* slots[kRanks];
#pragma unroll
  for (int step = 1; step < kRanks; ++step) {
    if (step < group.layout.size) slots[step] = slot_of((group.rank + step) % group.layout.size);
  }
  const auto load = [&](uint32_t item, CopyBlock& block) {
#pragma unroll
    for (int k = 0; k < kCopyDepth; ++k) {
      const uint32_t at = vector_index<kCopyDepth>(item, k) * Vector::kBytes;
      if (at < bytes) block.of[k] = load_any(from + at, bytes - at);
    }
  };
  const auto store = [&](uint32_t item, const CopyBlock& block) {
#pragma unroll
    for (int k = 0; k < kCopyDepth; ++k) {
      const uint32_t i = vector_index<kCopyDepth>(item, k);
      if (i >= num_vectors(bytes)) continue;
#pragma unroll
      for (int step = 1; step < kRanks; ++step) {
        if (step < group.layout.size) slots[step][i] = to_uint4(block.of[k]);
      }
    }
  };
  for_each_item<CopyBlock>(team, num_blocks<kCopyDepth>(bytes), load, store);
}

// As copy_chunks into slots, with this rank's factor applied on the way.
template <typename VectorReducer, typename TransferOf>
DPT_DEVICE void push_chunks(
    const Team& team, uint32_t count, uint32_t most, const Scale& scale, TransferOf transfer_of) {
  if (scale.input == 1) return copy_chunks(team, count, most, transfer_of);
  for (uint32_t part = 0; part < count; ++part) {
    const Transfer transfer = transfer_of(part);
    for (uint32_t i = team.thread(); i < num_vectors(transfer.bytes); i += team.num_threads()) {
      const uint32_t at = i * Vector::kBytes;
      const Vector input = load_any(transfer.from + at, transfer.bytes - at);
      store_user(transfer.to + at, VectorReducer::scale_input(input, scale), Vector::kBytes);
    }
  }
}

// What one reduction of a chunk reads and writes of this rank's own.
struct OwnChunk {
  const char* input;
  char* output;
  uint32_t bytes;
  Scale scale;
};

// Own input and the peers' slots, in rank order -> own output, and emit(i, vector) for the rest.
template <typename VectorReducer, int kRanks, typename SlotOf, typename Emit>
DPT_DEVICE void reduce_chunk(
    const Team& team, const GroupView& group, SlotOf slot_of, const OwnChunk& own, Emit emit) {
  struct Block {
    Vector of[kReduceDepth][kRanks];
  };
  const int size = group.layout.size;
  const int rank = group.rank;
  const bool plain = own.scale.input == 1 && is_aligned(address_of(own.input));
  const uint4* inputs[kRanks];
#pragma unroll
  for (int source = 0; source < kRanks; ++source) {
    if (source >= size) continue;
    inputs[source] = source == rank ? reinterpret_cast<const uint4*>(own.input) : slot_of(source);
  }
  const auto load = [&](uint32_t item, Block& block) {
    if (!plain) return;
#pragma unroll
    for (int k = 0; k < kReduceDepth; ++k) {
      const uint32_t i = vector_index<kReduceDepth>(item, k);
      if (i >= num_vectors(own.bytes)) continue;
#pragma unroll
      for (int source = 0; source < kRanks; ++source) {
        if (source < size) block.of[k][source] = to_vector(load_staged(inputs[source] + i));
      }
    }
  };
  const auto store = [&](uint32_t item, const Block& block) {
#pragma unroll
    for (int k = 0; k < kReduceDepth; ++k) {
      const uint32_t i = vector_index<kReduceDepth>(item, k);
      if (i >= num_vectors(own.bytes)) continue;
      const uint32_t at = i * Vector::kBytes;
      VectorReducer reducer;
      if (plain) {
#pragma unroll
        for (int source = 0; source < kRanks; ++source) {
          if (source < size) reducer.add(block.of[k][source]);
        }
      } else {
        for (int source = 0; source < size; ++source) {
          reducer.add(source == rank ? VectorReducer::scale_input(
                                           load_any(own.input + at, own.bytes - at), own.scale)
                                     : to_vector(load_staged(slot_of(source) + i)));
        }
      }
      const Vector result = reducer.result(own.scale);
      emit(i, result);
      store_user(own.output + at, result, own.bytes - at);
    }
  };
  for_each_item<Block>(team, num_blocks<kReduceDepth>(own.bytes), load, store);
}

}  // namespace dpt::cuda
