// An algorithm carries out one collective between ranks that share a Segment.
//
// Each file under algorithms/ holds one and ends with its table entry; table.cpp lists them. An
// algorithm must call `enter` as its first barrier, before it reads anything a peer wrote.
#pragma once

#include "algorithms/plan.hpp"
#include "base/types.hpp"
#include "base/wait.hpp"
#include "transport/shm/segment.hpp"

namespace dpt {

struct Operation {
  Collective collective;
  DataType dtype;
  ReduceOp reduce_op;
  double premul_factor;
  int root;
  size_t count;  // elements of one buffer, see dpt_request
  const void* const* inputs;
  void* const* outputs;
  uint64_t sequence;

  size_t bytes() const { return count * size_of(dtype); }
  std::string describe() const;  // "all_reduce #3 (1024 x float32, sum)"
};

struct RunContext {
  Segment& segment;  // groups of one rank have none and run "local"
  const Operation& operation;
  const Plan& plan;
  const WaitContext& wait;
  WaitStyle style;

  void barrier() const { segment.barrier(wait, style); }
};

struct Algorithm {
  const char* name;
  Collective collective;
  void (*run)(const RunContext& context);
};

// The entry for `name` and `collective`, or nullptr.
const Algorithm* find_algorithm(const char* name, Collective collective);

// First barrier of every operation: publishes this rank's header, waits for all ranks, and throws
// Error(DPT_ERR_MISMATCH), on every rank alike, when they entered different operations.
void enter(const RunContext& context);

// One rank's result of a group of one: inputs to outputs, scaled as the reduce op says.
void run_local(const Operation& operation);

// Applies the operation's reduce op over `sources`, one per rank in rank order.
void reduce_ranks(const RunContext& context,
                  const void* const* sources,
                  size_t count,
                  void* destination,
                  void* second_destination = nullptr);

// The part [begin, end) of `count` elements that `rank` of `size` reduces: equal shares, rounded up
// to whole cache lines so that no two ranks write one.
struct Share {
  size_t begin;
  size_t end;
  size_t count() const { return end - begin; }
};
Share share_of(size_t count, size_t element_bytes, int rank, int size);

// Pipeline steps of at most `chunk_bytes`, all of nearly equal length.
struct Chunks {
  size_t num_chunks;
  size_t elements;  // of each chunk but the last
};
Chunks split_chunks(size_t count, size_t element_bytes, size_t chunk_bytes);

extern const Algorithm kOneShotAllReduce;
extern const Algorithm kPipelinedAllReduce;
extern const Algorithm kPipelinedAllGather;
extern const Algorithm kPipelinedReduceScatter;
extern const Algorithm kPipelinedBroadcast;
extern const Algorithm kBarrier;

}  // namespace dpt
