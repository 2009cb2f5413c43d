// Pipelined reduce_scatter: a slot holds one block per peer. In step t every rank copies chunk t of
// the inputs meant for its peers into its slot. It also reduces chunk t-1 of what all ranks hold
// for it, its own part straight from the input. There is one barrier a step.
//
// Registered inputs are read in place; if all are, the message is one chunk.
#include <algorithm>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

void run_pipelined_reduce_scatter(const RunContext& context) {
  Segment& segment = context.segment;
  const Operation& operation = context.operation;
  const size_t element_bytes = size_of(operation.dtype);
  const int me = context.me();
  const int size = context.size();
  const size_t block_bytes = lane_bytes_of(context.plan.chunk_bytes, size - 1);
  Chunks chunks = split_chunks(operation.count, element_bytes, block_bytes);
  auto input = [&](int rank, size_t begin) {
    return static_cast<const char*>(operation.inputs[rank]) + begin * element_bytes;
  };
  auto length = [&](size_t begin) { return std::min(chunks.elements, operation.count - begin); };
  auto parity = [&](size_t step) { return (segment.next_step + step) & 1; };
  auto lane = [&](int from, int to, size_t step) {
    return segment.slot(from, parity(step)) + (to < from ? to : to - 1) * block_bytes;
  };
  std::vector<bool> stages(size);  // which of this rank's inputs peers read from its slot
  for (int rank = 0; rank < size; ++rank) {
    stages[rank] = rank != me && !segment.offset_of(operation.inputs[rank], operation.bytes());
  }
  const bool stages_any = std::find(stages.begin(), stages.end(), true) != stages.end();
  auto copy_in = [&](size_t step) {
    const size_t begin = step * chunks.elements;
    for (int rank = 0; rank < size; ++rank) {
      if (stages[rank]) {
        copy(lane(me, rank, step), input(rank, begin), length(begin) * element_bytes);
      }
    }
  };

  copy_in(0);
  const Entered entered = enter(context, {.num_steps = stages_any, .lane_bytes = 0});
  if (entered.num_steps == 0) chunks = {1, operation.count};
  std::vector<const char*> registered(size);
  for (int rank = 0; rank < size; ++rank) {
    registered[rank] = rank == me ? input(me, 0) : context.reach_input(rank, me);
  }
  std::vector<const void*> sources(size);
  for (size_t step = 1; step <= chunks.num_chunks; ++step) {
    if (step < chunks.num_chunks) copy_in(step);
    const size_t begin = (step - 1) * chunks.elements;
    for (int rank = 0; rank < size; ++rank) {
      sources[rank] = registered[rank] != nullptr ? registered[rank] + begin * element_bytes
                                                  : lane(rank, me, step - 1);
    }
    char* output = static_cast<char*>(operation.outputs[0]) + begin * element_bytes;
    reduce_ranks(context, sources.data(), length(begin), {output});
    if (step < chunks.num_chunks || entered.any_registered) context.barrier();
  }
  segment.next_step += chunks.num_chunks;
}

}  // namespace

const Algorithm kPipelinedReduceScatter{
    AlgorithmName::kPipelined, DPT_REDUCE_SCATTER, run_pipelined_reduce_scatter};

}  // namespace dpt
