// One operation of a staged group: what every rank copies up, what is reduced and where, and what
// each copies down. Pure; the same on every rank but for its own buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/types.hpp"
#include "staged/board.hpp"
#include "transport/node_layout.hpp"

namespace dpt::staged {

// The ranks of a group, and which of them this one is.
struct Membership {
  NodeLayout layout;
  int rank;

  int node() const { return layout.node_of[rank]; }
  int local() const { return layout.local_of[rank]; }
};

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
    int from;      // the rank of this node whose slot it is in; kReduce: none, the result's
    size_t piece;  // of that slot
    char* to;      // kReduceOnDevice: nowhere, as they go to the lane's buffer
    bool travelled = false;  // kExchange: it came from another node
  };

  static constexpr int kResult = -1;

  // Whether the devices of one node reduce with Cut::threads of 0. Then a rank copies down its own
  // part alone, or the whole of one other rank; with more of them an all_reduce is a reduce_scatter
  // and an all_gather, half as much again to copy down, and no worker.
  static bool adds_on_device(Collective collective, DataType dtype, ReduceOp op);
  struct Wish {
    Collective collective;
    DataType dtype;
    ReduceOp op;
    bool even = true;    // all parts are of one size
    bool nodes = false;  // the group spans some
  };
  // Empty, or why a staged group can't serve such a request.
  static std::string why_not(const Wish& wish);
  // Jobs that the operation takes, one behind the other. At least one.
  static std::vector<Job> of(const dpt_request& request,
                             const Cut& cut,
                             const Membership& ranks,
                             const Shape& shape);

  Kind kind;
  DataType dtype;
  ReduceOp op;
  double factor;                    // of this rank's input, with DPT_PREMUL_SUM
  std::vector<const char*> pieces;  // of this rank; none: it gives nothing
  size_t first_piece = 0;           // where they begin in its slot
  size_t num_pieces;                // of a slot
  std::vector<Download> downloads;
  const char* own = nullptr;  // copied to own_to on the device, or added there to what came
  char* own_to = nullptr;
  size_t piece_bytes;
  size_t chunk_bytes;  // of one piece
  uint64_t chunks;     // at least one
  int threads;         // workers of each rank that reduce; 0 but for kReduce
  uint32_t description;

  // Between nodes, all of a slot is one block for each: see internode/internode_sender.hpp.
  bool collects = false;  // nodes add up what others have of their block
  bool spreads = false;   // and get the others' blocks
  ReduceOp nodes_op;      // of the nodes' results
  int nodes_divisor;      // DPT_AVG

  size_t offset(uint64_t chunk) const { return chunk * chunk_bytes; }
  size_t bytes(uint64_t chunk) const {
    const size_t rest = piece_bytes - offset(chunk);
    return rest < chunk_bytes ? rest : chunk_bytes;
  }
  // The distance between the pieces in a slot.
  size_t pitch(uint64_t chunk) const { return round_up(bytes(chunk), kCacheLine); }
  size_t bytes_of_slot(uint64_t chunk) const {
    return num_pieces == 1 ? bytes(chunk) : num_pieces * pitch(chunk);
  }
};

// The part of `bytes` that one of `workers` reduces: whole cache lines but for the end.
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
