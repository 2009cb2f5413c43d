#include "staged/board.hpp"

#include <new>

namespace dpt::staged {

size_t Board::bytes(const Shape& shape) {
  const size_t slots = (shape.ranks + 1) * shape.depth * shape.slot_bytes;
  return words_bytes(shape.ranks) + (shape.on_devices ? 0 : slots);
}

void Board::prepare(char* memory, const Shape& shape) {
  new (memory) Head{};
  const Board board(memory, shape);
  const auto before = static_cast<uint32_t>(shape.first_chunk - 1);
  for (size_t slot = 0; slot < kMostDepth; ++slot) board.reduced(slot).store(before);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    new (board.of_rank(rank)) OfRank{};
    board.checked(rank).store(before);
    for (size_t slot = 0; slot < kMostDepth; ++slot) {
      board.arrived(rank, slot).store(before);
      board.taken(rank, slot).store(before);
      board.ready(rank, slot).store(before);
    }
    board.gate(rank).store(kRunning, std::memory_order_release);
  }
}

}  // namespace dpt::staged
