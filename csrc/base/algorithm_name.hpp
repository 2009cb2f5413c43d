// Names of the ways to carry an operation out: a plan holds one of them.
//
// Profiles, reports and messages have a public name instead, a string, and only algorithm_name.cpp
// knows those.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace dpt {

enum class AlgorithmName : uint8_t {
  kDelegate,
  // In the hosts' memory.
  kLocal,  // a group of one rank
  kBarrier,
  kOneShot,
  kPipelined,
  kExchange,
  kMailbox,  // between two ranks
  kNodeBarrier,
  kNodeOneShot,
  kHierarchical,  // native code within nodes and between them
  // On the device.
  kLowLatency,
  kPacket,
  kTwoShot,
  kTree,  // along spanning trees, where links differ
  kPush,
  kCopyEngine,  // without a multiprocessor, so beside whatever computes
  kRing,
  kCpuReduce,  // staged through the host's memory
  // The delegate's own operations, in stages within nodes and between them. Users and stored
  // profiles know it as "hierarchical", as kHierarchical, which has no code in common with it. One
  // is for operations in the hosts' memory, the other for those on devices.
  kInStages,
};
inline constexpr int kNumAlgorithmNames = static_cast<int>(AlgorithmName::kInStages) + 1;

// The public name.
const char* name_of(AlgorithmName algorithm);
// The algorithm of that public name; nothing for a name that none has. `on_device`: it is an
// operation's on devices, which says what "hierarchical" means.
std::optional<AlgorithmName> algorithm_named(std::string_view name, bool on_device);

}  // namespace dpt
