// Pipelined broadcast: in step t the root copies chunk t into its slot while the others copy chunk
// t-1 out of it, with one barrier a step.
#include "algorithms/algorithm.hpp"
#include "base/error.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

void run(const RunContext& context) {
  Segment& segment = context.segment;
  const Operation& operation = context.operation;
  const bool is_root = segment.rank() == operation.root;
  const auto* input = static_cast<const char*>(operation.inputs[0]);
  auto* output = static_cast<char*>(operation.outputs[0]);
  const size_t bytes = operation.bytes();
  DPT_CHECK(context.plan.chunk_bytes <= Segment::kMaxChunkBytes);
  const Chunks chunks = split_chunks(bytes, 1, context.plan.chunk_bytes);

  auto slot = [&](size_t chunk) {
    return segment.slot(operation.root, (segment.next_step + chunk) & 1);
  };
  auto length = [&](size_t chunk) {
    return std::min(chunks.elements, bytes - chunk * chunks.elements);
  };
  for (size_t step = 0; step <= chunks.num_chunks; ++step) {
    if (is_root && step < chunks.num_chunks) {
      copy(slot(step), input + step * chunks.elements, length(step));
    }
    if (!is_root && step >= 1) {
      copy(output + (step - 1) * chunks.elements, slot(step - 1), length(step - 1));
    }
    if (step == 0) {
      enter(context);
    } else if (step < chunks.num_chunks) {
      context.barrier();
    }
  }
  if (is_root && output != input) copy(output, input, bytes);
  segment.next_step += chunks.num_chunks;
}

}  // namespace

const Algorithm kPipelinedBroadcast{"pipelined", DPT_BROADCAST, run};

}  // namespace dpt
