// Describes the GPUs of a group, as far as times depend on them.
#pragma once

#include <string_view>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "cuda/trees/trees.hpp"

namespace dpt {

struct DeviceClass {
  // "NVIDIA H200, 132 SMs, over NVLink", with the links where these differ: lasts as long as the
  // process.
  std::string_view text;
  int num_sms;       // of the smallest
  bool nvlink;       // between all of them
  bool shared;       // several ranks use one GPU
  bool peer_access;  // no two of them are known to lack it
  bool peer_access_is_known;
  // The links between the GPUs of a node, in rank order. The matrix has size 0 where it is of no
  // use. That is so if links are alike, if some GPU can't be reached by way of any others, or if
  // the group spans nodes.
  LinkMatrix links;
  std::vector<int> cpus;  // near this rank's own, where that may matter; empty: unknown
};

// Called by all ranks of a node, whose numbers in the job are `global_ranks`, each with the number
// of its own device; the same on all of them.
DeviceClass describe_devices(const RunContext& context,
                             int device,
                             const std::vector<int64_t>& global_ranks,
                             bool spans_nodes);

// The key for times of the delegate in stages between such nodes, and of nothing else. An example
// is "NVIDIA H200, 132 SMs, over NVLink, in stages of NCCL". The text lasts as long as the process.
std::string_view text_in_stages(const DeviceClass& devices);

}  // namespace dpt
