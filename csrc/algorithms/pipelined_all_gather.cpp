// Pipelined all_gather: in step t every rank copies chunk t of its input into its slot and chunk
// t-1 of every peer from theirs into its outputs, with one barrier a step.
#include "algorithms/algorithm.hpp"
#include "base/error.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

void run(const RunContext& context) {
  Segment& segment = context.segment;
  const Operation& operation = context.operation;
  const auto* input = static_cast<const char*>(operation.inputs[0]);
  const size_t bytes = operation.bytes();
  const size_t chunk_bytes = context.plan.chunk_bytes;
  DPT_CHECK(chunk_bytes <= Segment::kMaxChunkBytes);
  const Chunks chunks = split_chunks(bytes, 1, chunk_bytes);

  for (size_t step = 0; step <= chunks.num_chunks; ++step) {
    if (step < chunks.num_chunks) {
      const size_t begin = step * chunks.elements;
      const int parity = (segment.next_step + step) & 1;
      const size_t length = std::min(chunks.elements, bytes - begin);
      copy(segment.slot(segment.rank(), parity), input + begin, length);
    }
    if (step >= 1) {
      const size_t begin = (step - 1) * chunks.elements;
      const int parity = (segment.next_step + step - 1) & 1;
      const size_t length = std::min(chunks.elements, bytes - begin);
      for (int rank = 0; rank < segment.size(); ++rank) {
        char* output = static_cast<char*>(operation.outputs[rank]) + begin;
        const bool own = rank == segment.rank();
        const char* source = own ? input + begin : segment.slot(rank, parity);
        if (output != source) copy(output, source, length);
      }
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

const Algorithm kPipelinedAllGather{"pipelined", DPT_ALL_GATHER, run};

}  // namespace dpt
