#include "comm/device_class.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "base/env.hpp"
#include "base/error.hpp"
#include "comm/measure.hpp"
#include "cuda/device_trials.hpp"
#include "cuda/trees/device_links.hpp"
#include "topology/topology.hpp"

namespace dpt {
namespace {

struct Shared {
  char model[80];
  char uuid[48];
  int num_sms;
  bool no_peer_access;  // as this process was told
};

// The links to all others, as this process sees them; containers may hide their GPUs.
enum class Path : int { kNvlink, kPcie, kUnknown };

const Gpu* find_gpu(const std::vector<Gpu>& gpus, const char* uuid) {
  for (const Gpu& gpu : gpus) {
    if (gpu.uuid == uuid) return &gpu;
  }
  return nullptr;
}

// NVLinks from one GPU to another that NVML knows of; containers may hide either.
std::optional<int> nvlinks_by_nvml(const char* from, const char* to) {
  static const std::vector<Gpu> gpus = [] {
    std::string note;
    return discover_gpus(Roots{}.nvml_library, &note);
  }();
  const Gpu* own = find_gpu(gpus, from);
  const Gpu* peer = find_gpu(gpus, to);
  if (own == nullptr || peer == nullptr) return std::nullopt;
  const auto link = std::find_if(own->links.begin(), own->links.end(), [&](const GpuLink& each) {
    return each.peer == peer->index;
  });
  return link == own->links.end() ? 0 : link->nvlinks;
}

bool is_same(const Shared& one, const Shared& other) {
  return std::strcmp(one.uuid, other.uuid) == 0;
}

Path path_to(int device, const Shared& mine, const Shared& other) {
  if (is_same(mine, other)) return Path::kNvlink;
  if (const auto nvlink = cuda::has_nvlink(device, other.uuid)) {
    return *nvlink ? Path::kNvlink : Path::kPcie;
  }
  const auto nvlinks = nvlinks_by_nvml(mine.uuid, other.uuid);
  return !nvlinks ? Path::kUnknown : *nvlinks != 0 ? Path::kNvlink : Path::kPcie;
}

Path worst_path(int device, const Shared& mine, const std::vector<Shared>& all) {
  Path worst = Path::kNvlink;
  for (const Shared& each : all) worst = std::max(worst, path_to(device, mine, each));
  return worst;
}

// From the best to the worst.
enum class PeerAccess : int { kFull, kUnknown, kNone };

PeerAccess peer_access_to(int device, const Shared& mine, const Shared& other) {
  if (mine.no_peer_access || other.no_peer_access) return PeerAccess::kNone;
  if (is_same(mine, other)) return PeerAccess::kFull;
  const auto found = cuda::has_peer_access(device, other.uuid);
  if (!found) return PeerAccess::kUnknown;
  return *found ? PeerAccess::kFull : PeerAccess::kNone;
}

PeerAccess peer_access_of(int device, const Shared& mine, const std::vector<Shared>& all) {
  PeerAccess access = PeerAccess::kFull;
  for (const Shared& each : all) {
    access = std::max(access, peer_access_to(device, mine, each));
  }
  return access;
}

int8_t link_to(int device, const Shared& mine, const Shared& other, int num_ranks) {
  if (peer_access_to(device, mine, other) == PeerAccess::kNone) return LinkMatrix::kNone;
  if (is_same(mine, other)) return kSameGpu;
  switch (path_to(device, mine, other)) {
    case Path::kPcie:
      return LinkMatrix::kPcie;
    case Path::kUnknown:
      return kUnseen;
    default:
      break;
  }
  // Two ranks have but one link, alike in any case, and asking takes a while.
  const int nvlinks = num_ranks == 2 ? 1 : nvlinks_by_nvml(mine.uuid, other.uuid).value_or(0);
  return static_cast<int8_t>(nvlinks == 0 ? kNvlinksUncounted
                                          : std::min(nvlinks, LinkMatrix::kMost));
}

// To all ranks, also where a user says so.
LinksSeen links_seen(int device,
                     const std::vector<Shared>& all,
                     int rank,
                     const std::vector<int64_t>& global_ranks) {
  const int size = static_cast<int>(all.size());
  LinksSeen seen{};
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const int8_t link = link_to(device, all[rank], all[peer], size);
    const auto emulated =
        emulated_link(env().emulated_links, global_ranks[rank], global_ranks[peer]);
    seen.to[peer] = link == LinkMatrix::kNone ? link : emulated.value_or(link);
  }
  return seen;
}

// The CPUs of the NUMA node that the GPU belongs to.
std::vector<int> cpus_near(const char* uuid) {
  static const Topology topology = discover();
  const Gpu* const gpu = find_gpu(topology.gpus, uuid);
  if (gpu == nullptr) return {};
  for (const NumaNode& node : topology.numa_nodes) {
    if (node.index == gpu->numa_node) return node.cpus;
  }
  return {};
}

const char* name_of(Path path) {
  switch (path) {
    case Path::kNvlink:
      return "over NVLink";
    case Path::kPcie:
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

DeviceClass describe_devices(const RunContext& context,
                             int device,
                             const std::vector<int64_t>& global_ranks,
                             bool spans_nodes) {
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
  // Another rank may see what one doesn't, and one slow pair makes a slow group.
  Path path = Path::kNvlink;
  for (const Path seen : exchange(context, worst_path(device, mine, all))) {
    path = std::max(path, seen);
  }
  PeerAccess access = PeerAccess::kFull;
  for (const PeerAccess seen : exchange(context, peer_access_of(device, mine, all))) {
    access = std::max(access, seen);
  }
  LinkMatrix links;
  if (all.size() <= size_t{cuda::kMaxRanks}) {
    const int rank = context.segment.rank();
    links = links_between(exchange(context, links_seen(device, all, rank, global_ranks)));
    if (!are_complete(links)) access = PeerAccess::kNone;
    if (spans_nodes || wiring_of(links) == cuda::Wiring::kAlike || !are_connected(links)) {
      links = {};
    }
  }
  const bool staged = access == PeerAccess::kNone && links.size == 0;
  const bool alone = all.size() == 1;  // of a group that spans nodes
  if (staged) {
    text += "without peer access";
  } else if (access != PeerAccess::kNone) {
    text += alone ? "alone on its node" : name_of(path);
    if (links.size != 0) text += ", ";
  }
  if (links.size != 0) text += "links " + to_text(links);
  if (!env().emulated_links.empty()) text += ", emulated";
  return {.text = keep(text),
          .num_sms = num_sms,
          .nvlink = path == Path::kNvlink,
          .shared = uuids.size() < all.size(),
          .peer_access = access != PeerAccess::kNone,
          .peer_access_is_known = access != PeerAccess::kUnknown,
          .links = links,
          .cpus = access == PeerAccess::kFull ? std::vector<int>{} : cpus_near(mine.uuid)};
}

std::string_view text_in_stages(const DeviceClass& devices) {
  return keep(std::string(devices.text) + ", in stages of NCCL");
}

}  // namespace dpt
