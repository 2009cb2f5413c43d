#include "algorithms/algorithm.hpp"

namespace dpt {

const Algorithm* find_algorithm(AlgorithmName name, Collective collective) {
  static const Algorithm* const table[] = {
      &kOneShotAllReduce,
      &kOneShotReduce,
      &kPipelinedAllReduce,
      &kPipelinedReduce,
      &kPipelinedReduceScatter,
      &kExchangeAllGather,
      &kExchangeBroadcast,
      &kExchangeGather,
      &kExchangeScatter,
      &kExchangeAllToAll,
      &kBarrier,
      &kNodeBarrier,
      &kNodeOneShotAllReduce,
      &kNodeOneShotReduce,
      &kNodeOneShotReduceScatter,
      &kNodeOneShotAllGather,
      &kNodeOneShotBroadcast,
      &kHierarchicalAllReduce,
      &kHierarchicalReduce,
      &kHierarchicalReduceScatter,
      &kHierarchicalBroadcast,
      &kHierarchicalAllGather,
      &kHierarchicalGather,
      &kHierarchicalScatter,
      &kHierarchicalAllToAll,
  };
  for (const Algorithm* algorithm : table) {
    if (algorithm->collective == collective && algorithm->name == name) return algorithm;
  }
  return nullptr;
}

}  // namespace dpt
