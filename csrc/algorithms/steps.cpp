// The steps that algorithms share: entering, reducing in rank order, cutting into chunks.
#include <algorithm>
#include <array>
#include <sstream>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "base/error.hpp"
#include "host/copy.hpp"
#include "host/reduce.hpp"

namespace dpt {
namespace {

OpHeader header_of(const Operation& operation) {
  const bool rooted = operation.collective == DPT_BROADCAST;
  return {operation.sequence,
          operation.count,
          operation.premul_factor,
          operation.collective,
          operation.dtype,
          operation.reduce_op,
          rooted ? operation.root : 0};
}

bool same_operation(const OpHeader& a, const OpHeader& b) {
  // Each rank may bring its own premul_factor.
  return a.sequence == b.sequence && a.count == b.count && a.collective == b.collective &&
         a.dtype == b.dtype && a.reduce_op == b.reduce_op && a.root == b.root;
}

std::string describe(const OpHeader& header) {
  std::ostringstream out;
  out << name_of(static_cast<Collective>(header.collective)) << " #" << header.sequence;
  if (header.collective == DPT_BARRIER) return out.str();
  out << " (" << header.count << " x " << name_of(static_cast<DataType>(header.dtype));
  if (header.reduce_op != DPT_NO_REDUCE) {
    out << ", " << name_of(static_cast<ReduceOp>(header.reduce_op));
  }
  if (header.collective == DPT_BROADCAST) out << ", root " << header.root;
  out << ")";
  return out.str();
}

}  // namespace

std::string Operation::describe() const { return dpt::describe(header_of(*this)); }

void enter(const RunContext& context) {
  Segment& segment = context.segment;
  const int parity = context.operation.sequence & 1;
  segment.header(segment.rank(), parity) = header_of(context.operation);
  context.barrier();
  const OpHeader& mine = segment.header(segment.rank(), parity);
  for (int peer = 0; peer < segment.size(); ++peer) {
    const OpHeader& theirs = segment.header(peer, parity);
    if (same_operation(mine, theirs)) continue;
    throw Error(DPT_ERR_MISMATCH,
                context.wait.describe() + ": ranks entered different operations: rank " +
                    std::to_string(segment.global_rank(segment.rank())) + " " + describe(mine) +
                    ", rank " + std::to_string(segment.global_rank(peer)) + " " + describe(theirs) +
                    ". Every rank must call the same collective with the same size and dtype");
  }
}

void reduce_ranks(const RunContext& context,
                  const void* const* sources,
                  size_t count,
                  void* destination,
                  void* second_destination) {
  const Operation& operation = context.operation;
  Segment& segment = context.segment;
  std::array<double, 256> factors;
  if (operation.reduce_op == DPT_PREMUL_SUM) {
    for (int rank = 0; rank < segment.size(); ++rank) {
      factors[rank] = segment.header(rank, operation.sequence & 1).premul_factor;
    }
  }
  reduce({.dtype = operation.dtype,
          .op = operation.reduce_op,
          .sources = sources,
          .num_sources = segment.size(),
          .factors = factors.data(),
          .count = count,
          .destination = destination,
          .second_destination = second_destination});
}

void run_local(const Operation& operation) {
  if (operation.collective == DPT_BARRIER || operation.count == 0) return;
  if (operation.reduce_op != DPT_NO_REDUCE) {
    reduce({.dtype = operation.dtype,
            .op = operation.reduce_op,
            .sources = operation.inputs,
            .num_sources = 1,
            .factors = &operation.premul_factor,
            .count = operation.count,
            .destination = operation.outputs[0]});
  } else if (operation.inputs[0] != operation.outputs[0]) {
    copy(operation.outputs[0], operation.inputs[0], operation.bytes());
  }
}

Share share_of(size_t count, size_t element_bytes, int rank, int size) {
  const size_t per_rank = round_up((count + size - 1) / size, kCacheLine / element_bytes);
  const size_t begin = std::min(count, per_rank * rank);
  return {begin, std::min(count, begin + per_rank)};
}

Chunks split_chunks(size_t count, size_t element_bytes, size_t chunk_bytes) {
  const size_t most = chunk_bytes / element_bytes;
  const size_t num_chunks = std::max<size_t>(1, (count + most - 1) / most);
  const size_t even = round_up((count + num_chunks - 1) / num_chunks, kCacheLine / element_bytes);
  const size_t elements = std::clamp<size_t>(even, 1, most);
  return {std::max<size_t>(1, (count + elements - 1) / elements), elements};
}

}  // namespace dpt
