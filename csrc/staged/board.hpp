// The memory that the ranks of a staged group share. It has slots for what devices copy up and for
// what is reduced. It also has the words by which devices and workers tell each other how far they
// are. Slots may lie on the devices where these reach each other's memory, each rank's on its own.
//
// Chunks of all operations are numbered through, from 1; chunk n uses slot n % depth of every rank.
// Words hold the low half of such a number and only grow, but for NOTE [Breaking]. Each slot has
// its own, because lanes may overtake each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/types.hpp"
#include "staged/copy_engine.hpp"

namespace dpt::staged {

// All ranks of a group agree on this.
struct Shape {
  int ranks = 0;          // of this node
  size_t slot_bytes = 0;  // whole pages
  int depth = 0;
  int threads = 0;           // most workers of one rank
  uint64_t first_chunk = 1;  // another in tests of numbers that go round
  bool on_devices = false;   // where the slots are; then nothing is reduced
  int nodes = 1;             // with as many ranks each
};

// NOTE [Breaking] A rank may stay away, or ranks may be in different operations. Then no lane may
// wait for ever, and nobody may take what comes out for a result. So first every rank's gate is
// shut, which the operation passes last; then all words go far ahead, so that every wait ends. Each
// rank's gate is opened by its own process, when that has decided what follows.
enum Gate : uint32_t { kHeld = 0, kRunning = 1, kReleased = 2 };

class Board {
 public:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kMostDepth = 4;

  static size_t bytes(const Shape& shape);
  // Memory of zeros that is a group's for the first time; by one rank, before others see it.
  static void prepare(char* memory, const Shape& shape);

  // `slots`: where this process has every rank's, on devices.
  Board(char* memory, const Shape& shape, std::vector<char*> slots = {})
      : memory_(memory), shape_(shape), slots_(std::move(slots)) {}

  const Shape& shape() const { return shape_; }

  // Written by the rank's device. It came to the chunk, and what it gives is in its slot.
  Word& arrived(int rank, size_t slot) const { return of_slot(rank, slot).arrived.word; }
  // It has got all that it takes of this chunk.
  Word& taken(int rank, size_t slot) const { return of_slot(rank, slot).taken.word; }
  // The number of its operations, from 1, that passed the gate.
  Word& finished(int rank) const { return of_rank(rank)->finished.word; }
  // The operation that begins with the chunk in this slot, and the factor of its input.
  Word& description(int rank, size_t slot) const { return of_slot(rank, slot).description; }
  Word& factor_low(int rank, size_t slot) const { return of_slot(rank, slot).factor_low; }
  Word& factor_high(int rank, size_t slot) const { return of_slot(rank, slot).factor_high; }

  // Written by workers, for the rank's device. The result of this chunk is in its slot, and nobody
  // reads its inputs any more. Where slots are passed on between nodes, for all devices: what other
  // nodes give for it is in this rank's slot.
  Word& ready(int rank, size_t slot) const { return of_slot(rank, slot).ready.word; }
  // The operation that begins with this chunk is the same on all ranks.
  Word& checked(int rank) const { return of_rank(rank)->checked.word; }
  Word& gate(int rank) const { return of_rank(rank)->gate.word; }

  // The input of the node's ranks for this chunk is reduced; between nodes alone.
  Word& reduced(size_t slot) const { return head()->reduced[slot].word; }
  // Workers that are done with the chunk in this slot.
  Word& counted(size_t slot) const { return head()->counted[slot].word; }
  // Not 0: broken, and why (pipeline.cpp).
  Word& broken() const { return head()->broken.word; }

  char* input(int rank, size_t slot) const {
    if (shape_.on_devices) return slots_[rank] + slot * shape_.slot_bytes;
    return inputs() + (static_cast<size_t>(rank) * shape_.depth + slot) * shape_.slot_bytes;
  }
  char* result(size_t slot) const { return input(shape_.ranks, slot); }
  // This rank's slots, to be touched first where they are used.
  char* inputs_of(int rank) const { return input(rank, 0); }
  size_t input_bytes() const { return shape_.depth * shape_.slot_bytes; }

 private:
  struct alignas(kCacheLine) Line {
    Word word;
  };
  struct OfSlot {
    Line arrived, taken, ready;
    alignas(kCacheLine) Word description;
    Word factor_low;
    Word factor_high;
  };
  struct Head {
    Line broken;
    Line counted[kMostDepth], reduced[kMostDepth];
  };
  struct OfRank {
    Line finished, checked, gate;
    OfSlot slots[kMostDepth];
  };

  static size_t words_bytes(int ranks) {
    return round_up(sizeof(Head) + ranks * sizeof(OfRank), kPage);
  }
  Head* head() const { return reinterpret_cast<Head*>(memory_); }
  OfRank* of_rank(int rank) const {
    return reinterpret_cast<OfRank*>(memory_ + sizeof(Head)) + rank;
  }
  OfSlot& of_slot(int rank, size_t slot) const { return of_rank(rank)->slots[slot]; }
  char* inputs() const { return memory_ + words_bytes(shape_.ranks); }

  char* memory_;
  Shape shape_;
  std::vector<char*> slots_;
};

}  // namespace dpt::staged
