// Pipelined all_reduce: the message moves through cache-sized slots in three overlapping phases.
//
// The message is cut into chunks. In step t every rank
//   1. copies chunk t into its slot, except its own share of it, which no peer reads
//   2. reduces its share of chunk t-1 from all slots (its own part straight from the input) into
//      the common result and its output
//   3. copies the other ranks' shares of chunk t-2 from the result to its output
// with one barrier a step. Each rank reads and writes about 3n bytes, mostly from cache.
#include <vector>

#include "algorithms/algorithm.hpp"
#include "base/error.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

struct Pipeline {
  const RunContext& context;
  Segment& segment = context.segment;
  const size_t element_bytes = size_of(context.operation.dtype);
  const char* input = static_cast<const char*>(context.operation.inputs[0]);
  char* output = static_cast<char*>(context.operation.outputs[0]);
  const Chunks chunks =
      split_chunks(context.operation.count, element_bytes, context.plan.chunk_bytes);
  std::vector<const void*> sources = std::vector<const void*>(segment.size());

  int parity(size_t chunk) const { return (segment.next_step + chunk) & 1; }
  size_t begin(size_t chunk) const { return chunk * chunks.elements; }
  size_t length(size_t chunk) const {
    return std::min(chunks.elements, context.operation.count - begin(chunk));
  }
  Share my_share(size_t chunk) const {
    return share_of(length(chunk), element_bytes, segment.rank(), segment.size());
  }

  // Copies all of a chunk but this rank's share.
  void copy_around_share(char* to, const char* from, size_t chunk) const {
    const Share share = my_share(chunk);
    const size_t after = share.end * element_bytes;
    copy(to, from, share.begin * element_bytes);
    copy(to + after, from + after, (length(chunk) - share.end) * element_bytes);
  }

  void copy_in(size_t chunk) const {
    copy_around_share(
        segment.slot(segment.rank(), parity(chunk)), input + begin(chunk) * element_bytes, chunk);
  }

  void reduce_share(size_t chunk) {
    const Share share = my_share(chunk);
    if (share.count() == 0) return;
    const size_t in_chunk = share.begin * element_bytes;
    const size_t in_message = begin(chunk) * element_bytes + in_chunk;
    for (int rank = 0; rank < segment.size(); ++rank) {
      sources[rank] = rank == segment.rank() ? input + in_message
                                             : segment.slot(rank, parity(chunk)) + in_chunk;
    }
    reduce_ranks(context,
                 sources.data(),
                 share.count(),
                 output + in_message,
                 segment.result(parity(chunk)) + in_chunk);
  }

  void copy_out(size_t chunk) const {
    copy_around_share(output + begin(chunk) * element_bytes, segment.result(parity(chunk)), chunk);
  }
};

void run(const RunContext& context) {
  DPT_CHECK(context.plan.chunk_bytes <= Segment::kMaxChunkBytes);
  Pipeline pipeline{context};
  const size_t num_chunks = pipeline.chunks.num_chunks;

  pipeline.copy_in(0);
  enter(context);
  for (size_t step = 1; step < num_chunks + 2; ++step) {
    if (step < num_chunks) pipeline.copy_in(step);
    if (step <= num_chunks) pipeline.reduce_share(step - 1);
    if (step >= 2) pipeline.copy_out(step - 2);
    if (step <= num_chunks) context.barrier();
  }
  context.segment.next_step += num_chunks;
}

}  // namespace

const Algorithm kPipelinedAllReduce{"pipelined", DPT_ALL_REDUCE, run};

}  // namespace dpt
