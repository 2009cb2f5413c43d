#include "topology/topology.hpp"

namespace dpt {

const GpuLink* find_link(const Topology& topology, int from, int to) {
  for (const Gpu& gpu : topology.gpus) {
    if (gpu.index != from) continue;
    for (const GpuLink& link : gpu.links) {
      if (link.peer == to) return &link;
    }
  }
  return nullptr;
}

bool has_full_nvlink(const Topology& topology) {
  for (const Gpu& from : topology.gpus) {
    for (const Gpu& to : topology.gpus) {
      if (from.index == to.index) continue;
      const GpuLink* link = find_link(topology, from.index, to.index);
      if (link == nullptr || link->nvlinks == 0) return false;
    }
  }
  return topology.gpus.size() > 1;
}

}  // namespace dpt
