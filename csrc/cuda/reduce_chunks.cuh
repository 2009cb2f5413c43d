// The step that kernels with queues share: one vector of every rank's chunk, reduced.
#pragma once

#include "cuda/channel.cuh"
#include "cuda/vectors.cuh"

namespace dpt::cuda {

// Vector number `index` of the chunks that have come in, and `own` in this rank's place. All loads
// are under way before the first is used.
template <typename VectorReducer>
DPT_DEVICE Vector reduce_incoming(const Channel& channel,
                                  const GroupView& group,
                                  uint64_t index,
                                  const Vector& own,
                                  const Scale& scale) {
  Vector parts[kMaxRanks];
#pragma unroll
  for (int source = 0; source < kMaxRanks; ++source) {
    if (source >= group.layout.size) continue;
    parts[source] = source == group.rank
                        ? own
                        : to_vector(load_staged(channel.incoming(kInputs, source) + index));
  }
  VectorReducer reducer;
#pragma unroll
  for (int source = 0; source < kMaxRanks; ++source) {
    if (source < group.layout.size) reducer.add(parts[source]);
  }
  return reducer.result(scale);
}

}  // namespace dpt::cuda
