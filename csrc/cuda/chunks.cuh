// Workers use this on a chunk: they copy it, or reduce it with those of the other ranks. Several
// loads of each thread are under way at a time, since a GPU's memory answers late.
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
  DPT_DEVICE uint64_t bytes(uint32_t round) const { return cut_.bytes_at(offset(round)); }

 private:
  const Cut& cut_;
};

constexpr int kCopiesAtOnce = 8;
constexpr int kReductionsAtOnce = 2;

// Calls visit(i) for the workers' vectors of `count`, `kAtOnce` of a thread in a row: first all
// their loads, then all their stores.
template <int kAtOnce, typename Value, typename Load, typename Store>
DPT_DEVICE void for_each_vector(const WorkerGroup& workers,
                                uint32_t count,
                                Load load,
                                Store store) {
  const uint32_t stride = workers.num_threads;
  for (uint32_t first = workers.thread; first < count; first += kAtOnce * stride) {
    Value values[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * stride < count) load(first + k * stride, values[k]);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * stride < count) store(first + k * stride, values[k]);
    }
  }
}

// Vectors that are whole and aligned; the rest of a chunk goes the slow way.
DPT_DEVICE uint32_t num_plain(uint64_t addresses, uint64_t bytes) {
  return addresses % Vector::kBytes == 0 ? static_cast<uint32_t>(bytes / Vector::kBytes) : 0;
}
DPT_DEVICE uint32_t num_vectors(uint64_t bytes) {
  return static_cast<uint32_t>((bytes + Vector::kBytes - 1) / Vector::kBytes);
}

// One vector of a chunk of which `left` bytes follow -> a slot, or a landing, which ends there.
DPT_DEVICE void store_chunk(uint4* to, const Vector& value, uint64_t left, bool lands) {
  if (lands) {
    store_user(reinterpret_cast<char*>(to), value, left);
  } else {
    *to = to_uint4(value);
  }
}

// The caller's memory -> a slot, or a landing.
DPT_DEVICE void push_chunk(
    const WorkerGroup& workers, const char* from, uint64_t bytes, uint4* to, bool lands = false) {
  const uint32_t plain = num_plain(address_of(from), bytes);
  const auto* const vectors = reinterpret_cast<const uint4*>(from);
  for_each_vector<kCopiesAtOnce, uint4>(
      workers,
      plain,
      [&](uint32_t i, uint4& value) { value = vectors[i]; },
      [&](uint32_t i, const uint4& value) { to[i] = value; });
  for (uint32_t i = plain + workers.thread; i < num_vectors(bytes); i += workers.num_threads) {
    const uint64_t at = uint64_t{i} * Vector::kBytes;
    store_chunk(to + i, load_user<Vector>(from + at, bytes - at), bytes - at, lands);
  }
}

// A slot -> the caller's memory.
DPT_DEVICE void collect_chunk(const WorkerGroup& workers,
                              const uint4* from,
                              uint64_t bytes,
                              char* to) {
  const uint32_t plain = num_plain(address_of(to), bytes);
  auto* const vectors = reinterpret_cast<uint4*>(to);
  for_each_vector<kCopiesAtOnce, uint4>(
      workers,
      plain,
      [&](uint32_t i, uint4& value) { value = load_staged(from + i); },
      [&](uint32_t i, const uint4& value) { vectors[i] = value; });
  for (uint32_t i = plain + workers.thread; i < num_vectors(bytes); i += workers.num_threads) {
    const uint64_t at = uint64_t{i} * Vector::kBytes;
    store_user(to + at, to_vector(load_staged(from + i)), bytes - at);
  }
}

// A chunk goes from the caller's memory where `kBegins`, else from what a peer wrote. That is a
// slot's whole vectors, or what has landed in the caller's memory, where others may be writing what
// lies behind it. It goes to the next rank's slot or landing, to the caller's memory, or to both.
struct Hop {
  const void* from;
  bool has_landed;
  uint4* next;   // or nullptr
  bool lands;    // there
  char* output;  // or nullptr
  uint64_t bytes;
};
template <bool kBegins>
DPT_DEVICE void relay_chunk(const WorkerGroup& workers, const Hop& hop) {
  const uint64_t from = kBegins ? address_of(hop.from) : 0;
  const uint32_t plain = num_plain(from | address_of(hop.output), hop.bytes);
  const auto* const vectors = static_cast<const uint4*>(hop.from);
  auto* const outputs = reinterpret_cast<uint4*>(hop.output);
  for_each_vector<kCopiesAtOnce, uint4>(
      workers,
      plain,
      [&](uint32_t i, uint4& value) { value = kBegins ? vectors[i] : load_staged(vectors + i); },
      [&](uint32_t i, const uint4& value) {
        if (hop.next != nullptr) hop.next[i] = value;
        if (outputs != nullptr) outputs[i] = value;
      });
  for (uint32_t i = plain + workers.thread; i < num_vectors(hop.bytes); i += workers.num_threads) {
    const uint64_t at = uint64_t{i} * Vector::kBytes;
    const char* const start = static_cast<const char*>(hop.from) + at;
    const Vector value = kBegins || hop.has_landed ? load_user<Vector>(start, hop.bytes - at)
                                                   : to_vector(load_staged(vectors + i));
    if (hop.next != nullptr) store_chunk(hop.next + i, value, hop.bytes - at, hop.lands);
    if (hop.output != nullptr) store_user(hop.output + at, value, hop.bytes - at);
  }
}

// The caller's memory -> the caller's memory.
DPT_DEVICE void copy_chunk(const WorkerGroup& workers, const char* from, uint64_t bytes, char* to) {
  const uint32_t plain = num_plain(address_of(from) | address_of(to), bytes);
  for_each_vector<kCopiesAtOnce, uint4>(
      workers,
      plain,
      [&](uint32_t i, uint4& value) { value = reinterpret_cast<const uint4*>(from)[i]; },
      [&](uint32_t i, const uint4& value) { reinterpret_cast<uint4*>(to)[i] = value; });
  for (uint32_t i = plain + workers.thread; i < num_vectors(bytes); i += workers.num_threads) {
    const uint64_t at = uint64_t{i} * Vector::kBytes;
    store_user(to + at, load_user<Vector>(from + at, bytes - at), bytes - at);
  }
}

// As push_chunk, with each rank's factor applied to what it sends.
template <typename VectorReducer>
DPT_DEVICE void push_scaled_chunk(
    const WorkerGroup& workers, const char* from, uint64_t bytes, uint4* to, const Scale& scale) {
  if (scale.input == 1) return push_chunk(workers, from, bytes, to);
  for (uint32_t i = workers.thread; i < num_vectors(bytes); i += workers.num_threads) {
    const uint64_t at = uint64_t{i} * Vector::kBytes;
    to[i] = to_uint4(VectorReducer::scale_input(load_user<Vector>(from + at, bytes - at), scale));
  }
}

// The places of a chunk at every peer, by the steps to its rank.
template <int kRanks>
class Places {
 public:
  // At byte `at` of their outputs.
  DPT_DEVICE Places(const GroupView& group, const Sender<>& sender, uint32_t round, uint64_t at)
      : group_(group), sender_(sender), round_(round) {
#pragma unroll
    for (int step = 1; step < kRanks; ++step) {
      if (step < group.layout.size) places_[step] = sender.place(peer(step), round, at);
    }
  }
  // Stores the chunk's vector of number i; `left` bytes of the chunk follow.
  DPT_DEVICE void store(uint32_t i, const Vector& value, uint64_t left = Vector::kBytes) const {
#pragma unroll
    for (int step = 1; step < kRanks; ++step) {
      if (step >= group_.layout.size) continue;
      if (left >= Vector::kBytes) {
        places_[step][i] = to_uint4(value);
      } else {
        store_chunk(places_[step] + i, value, left, sender_.lands(peer(step), round_));
      }
    }
  }

 private:
  DPT_DEVICE int peer(int step) const { return (group_.rank + step) % group_.layout.size; }

  const GroupView& group_;
  const Sender<>& sender_;
  uint32_t round_;
  uint4* places_[kRanks];
};

// The caller's memory -> every peer, read once.
template <int kRanks>
DPT_DEVICE void push_chunk_to_all(const WorkerGroup& workers,
                                  const char* from,
                                  uint64_t bytes,
                                  const Places<kRanks>& places) {
  const uint32_t plain = num_plain(address_of(from), bytes);
  const auto* const vectors = reinterpret_cast<const uint4*>(from);
  for_each_vector<kCopiesAtOnce, uint4>(
      workers,
      plain,
      [&](uint32_t i, uint4& value) { value = vectors[i]; },
      [&](uint32_t i, const uint4& value) { places.store(i, to_vector(value)); });
  for (uint32_t i = plain + workers.thread; i < num_vectors(bytes); i += workers.num_threads) {
    const uint64_t at = uint64_t{i} * Vector::kBytes;
    places.store(i, load_user<Vector>(from + at, bytes - at), bytes - at);
  }
}

// This rank's own data that one reduction of a chunk reads and writes.
struct OwnChunk {
  const char* input;
  char* output;
  uint64_t bytes;
  Scale scale;
};

// Own input and the peers' slots, in rank order -> own output, and emit(i, vector, bytes left) for
// the rest.
template <typename VectorReducer, int kRanks, typename SlotOf, typename Emit>
DPT_DEVICE void reduce_chunk(const WorkerGroup& workers,
                             const GroupView& group,
                             SlotOf slot_of,
                             const OwnChunk& own,
                             Emit emit) {
  struct OneOfEach {
    Vector of[kRanks];
  };
  const int size = group.layout.size;
  const int rank = group.rank;
  const uint4* inputs[kRanks];
#pragma unroll
  for (int source = 0; source < kRanks; ++source) {
    if (source >= size) continue;
    inputs[source] = source == rank ? reinterpret_cast<const uint4*>(own.input) : slot_of(source);
  }
  const auto load = [&](uint32_t i, OneOfEach& each) {
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (source < size) each.of[source] = to_vector(load_staged(inputs[source] + i));
    }
  };
  const bool scales = own.scale.input != 1;
  const uint32_t plain =
      scales ? 0 : num_plain(address_of(own.input) | address_of(own.output), own.bytes);
  for_each_vector<kReductionsAtOnce, OneOfEach>(
      workers, plain, load, [&](uint32_t i, const OneOfEach& each) {
        VectorReducer reducer;
#pragma unroll
        for (int source = 0; source < kRanks; ++source) {
          if (source < size) reducer.add(each.of[source]);
        }
        const Vector result = reducer.result(own.scale);
        emit(i, result, uint64_t{Vector::kBytes});
        reinterpret_cast<Vector*>(own.output)[i] = result;
      });

  // The rest is not aligned, is scaled or ends within a vector.
  for (uint32_t i = plain + workers.thread; i < num_vectors(own.bytes); i += workers.num_threads) {
    const uint64_t at = uint64_t{i} * Vector::kBytes;
    VectorReducer reducer;
    for (int source = 0; source < size; ++source) {
      reducer.add(source == rank ? VectorReducer::scale_input(
                                       load_user<Vector>(own.input + at, own.bytes - at), own.scale)
                                 : to_vector(load_staged(slot_of(source) + i)));
    }
    const Vector result = reducer.result(own.scale);
    emit(i, result, own.bytes - at);
    store_user(own.output + at, result, own.bytes - at);
  }
}

}  // namespace dpt::cuda
