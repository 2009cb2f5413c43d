#include "comm/device_class.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

#include "base/env.hpp"
#include "base/error.hpp"
#include "comm/measure.hpp"
#include "cuda/device_trials.hpp"
#include "topology/topology.hpp"

namespace dpt {
namespace {

struct Shared {
  char model[80];
  char uuid[48];
  int num_sms;
  bool no_peer_access;  // as this process was told
};

// What this process sees; containers may hide the others' GPUs.
enum class Links : int { kNvlink, kPcie, kUnknown };

const Gpu* find_gpu(const std::vector<Gpu>& gpus, const char* uuid) {
  for (const Gpu& gpu : gpus) {
    if (gpu.uuid == uuid) return &gpu;
  }
  return nullptr;
}

// What NVML knows of the link from one GPU to another; containers may hide either.
Links link_seen_by_nvml(const char* from, const char* to) {
  static const std::vector<Gpu> gpus = [] {
    std::string note;
    return discover_gpus(Roots{}.nvml_library, &note);
  }();
  const Gpu* own = find_gpu(gpus, from);
  const Gpu* peer = find_gpu(gpus, to);
  if (own == nullptr || peer == nullptr) return Links::kUnknown;
  const auto link = std::find_if(own->links.begin(), own->links.end(), [&](const GpuLink& each) {
    return each.peer == peer->index;
  });
  return link == own->links.end() || link->nvlinks == 0 ? Links::kPcie : Links::kNvlink;
}

Links links_from(int device, const Shared& mine, const std::vector<Shared>& all) {
  Links links = Links::kNvlink;
  for (const Shared& each : all) {
    if (std::strcmp(each.uuid, mine.uuid) == 0) continue;
    const auto nvlink = cuda::has_nvlink(device, each.uuid);
    const Links link = !nvlink   ? link_seen_by_nvml(mine.uuid, each.uuid)
                       : *nvlink ? Links::kNvlink
                                 : Links::kPcie;
    links = std::max(links, link);
  }
  return links;
}

// From the best to the worst.
enum class PeerAccess : int { kFull, kUnknown, kNone };

PeerAccess peer_access_of(int device, const Shared& mine, const std::vector<Shared>& all) {
  PeerAccess access = PeerAccess::kFull;
  for (const Shared& each : all) {
    if (each.no_peer_access) return PeerAccess::kNone;
    if (std::strcmp(each.uuid, mine.uuid) == 0) continue;
    const auto found = cuda::has_peer_access(device, each.uuid);
    const PeerAccess to = !found   ? PeerAccess::kUnknown
                          : *found ? PeerAccess::kFull
                                   : PeerAccess::kNone;
    access = std::max(access, to);
  }
  return access;
}

// Of the NUMA node that the GPU belongs to.
std::vector<int> cpus_near(const char* uuid) {
  static const Topology topology = discover();
  const Gpu* const gpu = find_gpu(topology.gpus, uuid);
  if (gpu == nullptr) return {};
  for (const NumaNode& node : topology.numa_nodes) {
    if (node.index == gpu->numa_node) return node.cpus;
  }
  return {};
}

const char* name_of(Links links) {
  switch (links) {
    case Links::kNvlink:
      return "over NVLink";
    case Links::kPcie:
      return "not all over NVLink";
    default:
      return "over unknown links";
  }
}

std::string_view keep(const std::string& text) {
  static std::mutex mutex;
  static auto* const texts = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  return *texts->insert(text).first;
}

}  // namespace

DeviceClass describe_devices(const RunContext& context, int device) {
  Shared mine{};
  mine.no_peer_access = env().no_peer_access;
  try {
    const cuda::DeviceModel model = cuda::model_of(device);
    const std::string text = model.name + ", " + std::to_string(model.num_sms) + " SMs";
    std::strncpy(mine.model, text.c_str(), sizeof mine.model - 1);
    std::strncpy(mine.uuid, model.uuid.c_str(), sizeof mine.uuid - 1);
    mine.num_sms = model.num_sms;
  } catch (const Error& error) {
    std::strncpy(mine.model, "an unknown GPU", sizeof mine.model - 1);
  }
  const std::vector<Shared> all = exchange(context, mine);
  int num_sms = mine.num_sms;
  std::set<std::string> models;
  std::set<std::string> uuids;
  for (const Shared& each : all) {
    models.insert(each.model);
    num_sms = std::min(num_sms, each.num_sms);
    uuids.insert(each.uuid);
  }
  std::string text;
  for (const std::string& model : models) text += model + ", ";
  // What one rank doesn't see another may, and one slow pair makes a slow group.
  Links links = Links::kNvlink;
  for (const Links seen : exchange(context, links_from(device, mine, all)))
    links = std::max(links, seen);
  PeerAccess access = PeerAccess::kFull;
  for (const PeerAccess seen : exchange(context, peer_access_of(device, mine, all))) {
    access = std::max(access, seen);
  }
  const bool staged = access == PeerAccess::kNone;
  const bool alone = all.size() == 1;  // of a group that spans nodes
  return {.text = keep(text + (staged  ? "without peer access"
                               : alone ? "alone on its node"
                                       : name_of(links))),
          .num_sms = num_sms,
          .nvlink = links == Links::kNvlink,
          .shared = uuids.size() < all.size(),
          .peer_access = !staged,
          .peer_access_is_known = access != PeerAccess::kUnknown,
          .cpus = access == PeerAccess::kFull ? std::vector<int>{} : cpus_near(mine.uuid)};
}

}  // namespace dpt
