// The bytes of every block of an all_gather or all_to_all between nodes. A caller knows its own
// alone, so all ranks tell theirs at the meeting. There every block is checked to be as long for
// its receiver as for its sender.
#pragma once

#include <vector>

#include "algorithms/nodes.hpp"

namespace dpt {

class BlockSizes {
 public:
  // Whether ranks that lie so can tell each other their blocks' sizes. The sizes of all blocks must
  // fit into a small buffer. The sizes of a node's ranks must fit into what the node says at the
  // meeting. An all_to_all of up to 90 ranks fits, with as many on each node.
  static bool fit(Collective collective, const NodeLayout& layout);

  // In place of enter_nodes. Error(DPT_ERR_MISMATCH), on every rank alike, names two ranks that do
  // not agree.
  static BlockSizes meet(const RunContext& context);

  // The size of what `source` gives to `receiver`.
  size_t bytes(int source, int receiver) const {
    return sent_.empty() ? even_ : sent_[source * per_rank_ + (per_rank_ == 1 ? 0 : receiver)];
  }

 private:
  size_t even_ = 0;
  size_t per_rank_ = 1;  // blocks of a source that differ
  std::vector<uint64_t> sent_;
};

}  // namespace dpt
