// Pipelined reduce_scatter: slots hold one block per receiving rank. In step t every rank copies
// chunk t of the inputs meant for its peers into its slot and reduces chunk t-1 of what all ranks
// hold for it (its own part straight from the input), with one barrier a step.
#include <algorithm>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "base/error.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

void run(const RunContext& context) {
  Segment& segment = context.segment;
  const Operation& operation = context.operation;
  const size_t element_bytes = size_of(operation.dtype);
  const int me = segment.rank();
  const size_t block_bytes =
      std::max(kCacheLine, context.plan.chunk_bytes / segment.size() / kCacheLine * kCacheLine);
  DPT_CHECK(block_bytes * segment.size() <= Segment::kMaxChunkBytes);
  const Chunks chunks = split_chunks(operation.count, element_bytes, block_bytes);
  std::vector<const void*> sources(segment.size());

  auto input = [&](int rank, size_t begin) {
    return static_cast<const char*>(operation.inputs[rank]) + begin * element_bytes;
  };
  for (size_t step = 0; step <= chunks.num_chunks; ++step) {
    if (step < chunks.num_chunks) {
      const size_t begin = step * chunks.elements;
      const size_t length = std::min(chunks.elements, operation.count - begin);
      char* slot = segment.slot(me, (segment.next_step + step) & 1);
      for (int rank = 0; rank < segment.size(); ++rank) {
        if (rank == me) continue;
        copy(slot + rank * block_bytes, input(rank, begin), length * element_bytes);
      }
    }
    if (step >= 1) {
      const size_t begin = (step - 1) * chunks.elements;
      const size_t length = std::min(chunks.elements, operation.count - begin);
      const int parity = (segment.next_step + step - 1) & 1;
      for (int rank = 0; rank < segment.size(); ++rank) {
        sources[rank] =
            rank == me ? input(me, begin)
                       : static_cast<const void*>(segment.slot(rank, parity) + me * block_bytes);
      }
      char* output = static_cast<char*>(operation.outputs[0]) + begin * element_bytes;
      reduce_ranks(context, sources.data(), length, output);
    }
    if (step == 0) {
      enter(context);
    } else if (step < chunks.num_chunks) {
      context.barrier();
    }
  }
  segment.next_step += chunks.num_chunks;
}

}  // namespace

const Algorithm kPipelinedReduceScatter{"pipelined", DPT_REDUCE_SCATTER, run};

}  // namespace dpt
