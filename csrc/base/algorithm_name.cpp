#include "base/algorithm_name.hpp"

namespace dpt {

const char* name_of(AlgorithmName algorithm) {
  switch (algorithm) {
    case AlgorithmName::kDelegate:
      return "delegate";
    case AlgorithmName::kLocal:
      return "local";
    case AlgorithmName::kBarrier:
      return "barrier";
    case AlgorithmName::kOneShot:
      return "one_shot";
    case AlgorithmName::kPipelined:
      return "pipelined";
    case AlgorithmName::kExchange:
      return "exchange";
    case AlgorithmName::kMailbox:
      return "mailbox";
    case AlgorithmName::kNodeBarrier:
      return "node_barrier";
    case AlgorithmName::kNodeOneShot:
      return "node_one_shot";
    case AlgorithmName::kLowLatency:
      return "low_latency";
    case AlgorithmName::kPacket:
      return "packet";
    case AlgorithmName::kTwoShot:
      return "two_shot";
    case AlgorithmName::kTree:
      return "tree";
    case AlgorithmName::kPush:
      return "push";
    case AlgorithmName::kCopyEngine:
      return "copy_engine";
    case AlgorithmName::kRing:
      return "ring";
    case AlgorithmName::kCpuReduce:
      return "cpu_reduce";
    case AlgorithmName::kHierarchical:
    case AlgorithmName::kInStages:
      return "hierarchical";
  }
  return "unknown algorithm";
}

std::optional<AlgorithmName> algorithm_named(std::string_view name, bool on_device) {
  const AlgorithmName namesake =
      on_device ? AlgorithmName::kHierarchical : AlgorithmName::kInStages;
  for (int index = 0; index < kNumAlgorithmNames; ++index) {
    const auto algorithm = static_cast<AlgorithmName>(index);
    if (algorithm != namesake && name == name_of(algorithm)) return algorithm;
  }
  return std::nullopt;
}

}  // namespace dpt
