// An algorithm carries out one collective between ranks that share a Segment.
//
// Each file under algorithms/ holds one and ends with its table entry; table.cpp lists them. An
// algorithm must call `enter` as its first barrier, before it reads anything a peer wrote.
#pragma once

#include <string>
#include <vector>

#include "algorithms/arrivals.hpp"
#include "algorithms/outline.hpp"
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
  const size_t* input_counts = nullptr;  // of each buffer; nullptr: all have `count`
  const size_t* output_counts = nullptr;
  uint64_t sequence = 0;

  size_t bytes() const { return count * size_of(dtype); }
  size_t input_bytes(int index) const {
    return (input_counts != nullptr ? input_counts[index] : count) * size_of(dtype);
  }
  size_t output_bytes(int index) const {
    return (output_counts != nullptr ? output_counts[index] : count) * size_of(dtype);
  }
  bool is_uneven() const { return input_counts != nullptr || output_counts != nullptr; }
  std::string describe() const;  // "all_reduce #3 (1024 x float32, sum)"
};

// How many input and output buffers an operation has on a rank of a group of `size`.
int num_inputs(Collective collective, bool is_root, int size);
int num_outputs(Collective collective, bool is_root, int size);

struct Nodes;  // see nodes.hpp

struct RunContext {
  // Groups of one rank have none and run "local"; with `nodes` it is of this node's ranks.
  Segment& segment;
  const Operation& operation;
  const Plan& plan;
  const WaitContext& wait;
  WaitStyle style;
  Nodes* nodes = nullptr;        // of a group that spans nodes
  Arrivals* arrivals = nullptr;  // to be told of each operation's; may be nullptr

  void barrier() const { segment.barrier(wait, style); }
  int me() const { return segment.rank(); }
  int size() const { return segment.size(); }
  int header_parity() const { return operation.sequence & 1; }
  // The place where a peer's buffer is mapped here; nullptr when it lies in memory of its own.
  char* reach(int rank, const BufferInfo& buffer) const {
    return buffer.offset == BufferInfo::kPrivate ? nullptr : segment.pool(rank) + buffer.offset;
  }
  char* reach_input(int rank, int index) const {
    return reach(rank, segment.inputs(rank, header_parity())[index]);
  }
  char* reach_output(int rank, int index) const {
    return reach(rank, segment.outputs(rank, header_parity())[index]);
  }
};

struct Algorithm {
  AlgorithmName name;
  Collective collective;
  void (*run)(const RunContext& context);
  Outline (*outline)(const NodeRun& run, const NodeLayout& layout) = nullptr;  // between nodes
};

// The entry for `name` and `collective`, or nullptr.
const Algorithm* find_algorithm(AlgorithmName name, Collective collective);

// The steps and bytes that this rank stages in its slot; the others learn them when they enter.
struct Staging {
  uint32_t num_steps = 0;
  uint32_t lane_bytes = 0;
};

// Facts of an operation that all ranks know once they have entered it.
struct Entered {
  uint32_t num_steps = 0;       // the most of any rank
  bool any_registered = false;  // a rank's buffers are reached directly: a closing barrier must
                                // keep it from going on before its peers are through
};

// First barrier of every operation: publishes this rank's header and waits for all ranks. Throws
// Error(DPT_ERR_MISMATCH), on every rank alike, when they entered different operations.
Entered enter(const RunContext& context, const Staging& staging);

// Writes this rank's header, as of now.
OpHeader& publish_header(const RunContext& context);
// After the barrier that follows: tells context.arrivals of it.
void note_arrivals(const RunContext& context);

// A rank describes its operation by this header.
OpHeader header_of(const Operation& operation);
bool same_operation(const OpHeader& a, const OpHeader& b);
// Error(DPT_ERR_MISMATCH) that names two ranks and what each entered.
struct EnteredBy {
  int64_t global_rank;
  const OpHeader& header;
};
[[noreturn]] void throw_mismatch(const RunContext& context, EnteredBy one, EnteredBy other);

// `enter` for messages so small that where the buffers lie does not matter.
void enter_small(const RunContext& context);

// One rank's result of a group of one: inputs to outputs, scaled as the reduce op says.
void run_local(const Operation& operation);

// Applies the operation's reduce op over `sources`, one per rank in rank order.
void reduce_ranks(const RunContext& context,
                  const void* const* sources,
                  size_t count,
                  const std::vector<void*>& destinations);

// The length of each of `num_lanes` equal parts of a slot, in whole cache lines.
size_t lane_bytes_of(size_t chunk_bytes, int num_lanes);

// The part [begin, end) of `count` elements that `rank` of `size` reduces. Shares are equal, but
// rounded up to whole cache lines so that no two ranks write the same line.
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
extern const Algorithm kOneShotReduce;
extern const Algorithm kPipelinedAllReduce;
extern const Algorithm kPipelinedReduce;
extern const Algorithm kPipelinedReduceScatter;
extern const Algorithm kExchangeAllGather;
extern const Algorithm kExchangeBroadcast;
extern const Algorithm kExchangeGather;
extern const Algorithm kExchangeScatter;
extern const Algorithm kExchangeAllToAll;
extern const Algorithm kBarrier;
extern const Algorithm kNodeBarrier;
extern const Algorithm kNodeOneShotAllReduce;
extern const Algorithm kNodeOneShotReduce;
extern const Algorithm kNodeOneShotReduceScatter;
extern const Algorithm kNodeOneShotAllGather;
extern const Algorithm kNodeOneShotBroadcast;
extern const Algorithm kHierarchicalAllReduce;
extern const Algorithm kHierarchicalReduce;
extern const Algorithm kHierarchicalReduceScatter;
extern const Algorithm kHierarchicalBroadcast;
extern const Algorithm kHierarchicalAllGather;
extern const Algorithm kHierarchicalGather;
extern const Algorithm kHierarchicalScatter;
extern const Algorithm kHierarchicalAllToAll;

}  // namespace dpt
