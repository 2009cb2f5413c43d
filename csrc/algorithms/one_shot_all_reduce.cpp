// One-shot all_reduce and reduce, for small messages: latency is one barrier.
//
//   1. copy the input into this rank's small buffer
//   2. barrier
//   3. every rank that gets the result reduces all buffers itself, in rank order, so all ranks hold
//      the same bits
//
// Each rank reads P*n bytes; above a few tens of KB the pipelined form does less.
#include <vector>

#include "algorithms/algorithm.hpp"
#include "base/error.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

void run_one_shot(const RunContext& context) {
  Segment& segment = context.segment;
  const Operation& operation = context.operation;
  const int parity = context.header_parity();
  DPT_CHECK(operation.bytes() <= Segment::kSmallBytes);

  copy(segment.small(context.me(), parity), operation.inputs[0], operation.bytes());
  enter_small(context);
  if (operation.collective == DPT_REDUCE && context.me() != operation.root) return;
  std::vector<const void*> sources(context.size());
  for (int rank = 0; rank < context.size(); ++rank) sources[rank] = segment.small(rank, parity);
  reduce_ranks(context, sources.data(), operation.count, {operation.outputs[0]});
}

}  // namespace

const Algorithm kOneShotAllReduce{AlgorithmName::kOneShot, DPT_ALL_REDUCE, run_one_shot};
const Algorithm kOneShotReduce{AlgorithmName::kOneShot, DPT_REDUCE, run_one_shot};

}  // namespace dpt
