// One operation of a staged group: what every rank copies up, what is reduced and where, and what
// each copies down. Pure; the same on every rank but for its own buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/types.hpp"
#include "staged/board.hpp"

namespace dpt::staged {

// How an operation is cut, from its plan; the same on every rank.
struct Cut {
  size_t chunk_bytes;  // most of one rank's slot that a chunk fills; 0: all of it
  int threads;         // workers of each rank that reduce; 0: devices do, where they can
};

// Each chunk takes the same range of every piece. Pieces lie in a slot one behind the other.
struct Job {
  enum class Kind {
    kReduce,          // workers reduce slots, and the result is copied down
    kExchange,        // slots are copied down as they are
    kReduceOnDevice,  // the same, and there the device adds them up with its own
  };
  struct Download {
    int from;      // the rank whose slot it is in; kReduce: none, the result's
    size_t piece;  // of that slot
    char* to;      // kReduceOnDevice: nowhere, as they go to the lane's buffer
  };

  static constexpr int kResult = -1;

  // Whether devices reduce with Cut::threads of 0. It pays where that is no more to copy down than
  // a rank copies up: its own part alone, or the whole of one other rank.
  static bool adds_on_device(Collective collective, DataType dtype, ReduceOp op, int ranks);
  // Empty, or why a staged group can't serve such a request.
  static std::string why_not(Collective collective, DataType dtype, ReduceOp op, bool even);
  static Job of(const dpt_request& request, const Cut& cut, int rank, const Shape& shape);

  Kind kind;
  DataType dtype;
  ReduceOp op;
  double factor;                    // of this rank's input, with DPT_PREMUL_SUM
  std::vector<const char*> pieces;  // of this rank; none: it gives nothing
  size_t num_pieces;                // of a rank that gives something
  std::vector<Download> downloads;
  const char* own = nullptr;  // copied to own_to on the device, or added there to what came
  char* own_to = nullptr;
  size_t piece_bytes;
  size_t chunk_bytes;  // of one piece
  uint64_t chunks;     // at least one
  int threads;         // workers of each rank that reduce; 0 but for kReduce
  uint32_t description;

  size_t offset(uint64_t chunk) const { return chunk * chunk_bytes; }
  size_t bytes(uint64_t chunk) const {
    const size_t rest = piece_bytes - offset(chunk);
    return rest < chunk_bytes ? rest : chunk_bytes;
  }
  // Of the pieces in a slot.
  size_t pitch(uint64_t chunk) const { return round_up(bytes(chunk), kCacheLine); }
};

// What one of `workers` reduces of `bytes`: whole cache lines but for the end.
struct Share {
  size_t begin;
  size_t end;
};
constexpr Share share_of(size_t bytes, int worker, int workers) {
  const size_t lines = (bytes + kCacheLine - 1) / kCacheLine;
  const size_t begin = lines * worker / workers * kCacheLine;
  const size_t end = lines * (worker + 1) / workers * kCacheLine;
  return {begin < bytes ? begin : bytes, end < bytes ? end : bytes};
}

}  // namespace dpt::staged
