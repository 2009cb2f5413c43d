// What the GPUs of a group are, as far as times depend on it.
#pragma once

#include <string_view>
#include <vector>

#include "algorithms/algorithm.hpp"

namespace dpt {

struct DeviceClass {
  std::string_view text;  // "NVIDIA H200, 132 SMs, over NVLink": lasts as long as the process
  int num_sms;            // of the smallest
  bool nvlink;            // between all of them
  bool shared;            // several ranks use one GPU
  bool peer_access;       // no two of them are known to lack it
  bool peer_access_is_known;
  std::vector<int> cpus;  // near this rank's own, where that may matter; empty: unknown
};

// Called by all ranks, each with the number of its own device; the same on all of them.
DeviceClass describe_devices(const RunContext& context, int device);

}  // namespace dpt
