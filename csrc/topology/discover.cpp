// The machine as sysfs and procfs tell it.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <sched.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <tuple>

#include "topology/sysfs.hpp"
#include "topology/topology.hpp"

namespace dpt {
namespace {

namespace fs = std::filesystem;

// ---- Files ----

// The kernel's list format: "0-3,8".
std::vector<int> parse_list(const std::string& text) {
  std::vector<int> list;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    const auto first = leading_integer(range);
    if (!first) continue;
    const size_t dash = range.find('-', 1);
    const auto last = dash == std::string::npos ? first : leading_integer(range.substr(dash + 1));
    for (int64_t i = *first; i <= last.value_or(*first); ++i) list.push_back(static_cast<int>(i));
  }
  return list;
}

// The value of "key: N kB" in a file such as /proc/meminfo, in bytes.
int64_t read_kilobytes(const fs::path& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t found = line.find(key + ":");
    if (found == std::string::npos) continue;
    return leading_integer(line.substr(found + key.size() + 1)).value_or(0) * 1024;
  }
  return 0;
}

// ---- CPUs ----

int affinity_count() {
  // A kernel built for more CPUs than the mask holds answers EINVAL.
  for (int capacity = 1024; capacity <= 1 << 20; capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(capacity);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(capacity);
    const bool failed = sched_getaffinity(0, bytes, set) == -1;
    const bool too_small = failed && errno == EINVAL;
    const int count = failed ? 0 : CPU_COUNT_S(bytes, set);
    CPU_FREE(set);
    if (!too_small) return std::max(count, 1);
  }
  return 1;
}

constexpr double kNoQuota = std::numeric_limits<double>::infinity();

double ratio(std::optional<int64_t> quota_us, std::optional<int64_t> period_us) {
  if (!quota_us || !period_us || *quota_us <= 0 || *period_us <= 0) return kNoQuota;
  return static_cast<double>(*quota_us) / static_cast<double>(*period_us);
}

// CPUs' worth of time that one cgroup grants, of either version.
double quota_of(const fs::path& group) {
  const std::string v2 = read_line(group / "cpu.max");  // "max 100000" or "150000 100000"
  if (!v2.empty()) {
    const size_t blank = std::min(v2.find(' '), v2.size());
    return ratio(leading_integer(v2), leading_integer(v2.substr(blank)));
  }
  return ratio(leading_integer(read_line(group / "cpu.cfs_quota_us")),
               leading_integer(read_line(group / "cpu.cfs_period_us")));
}

// The least that the process's cgroup and those above it grant.
double cgroup_quota(const Roots& roots) {
  double quota = kNoQuota;
  const fs::path mount = fs::path(roots.sys) / "fs/cgroup";
  std::ifstream groups(fs::path(roots.proc) / "self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path", "4:cpu,cpuacct:/path"
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_v2 = controllers == ",,";
    if (!is_v2 && controllers.find(",cpu,") == std::string::npos) continue;
    const fs::path top = is_v2 ? mount : mount / "cpu";
    // In a container the path may be the host's and absent here; the mount's top still counts.
    fs::path below = fs::path(line.substr(second + 1)).relative_path().lexically_normal();
    for (; !below.empty() && below != "."; below = below.parent_path()) {
      quota = std::min(quota, quota_of(top / below));
    }
    quota = std::min(quota, quota_of(top));
  }
  return quota;
}

std::vector<int> online_cpus(const Roots& roots) {
  return parse_list(read_line(fs::path(roots.sys) / "devices/system/cpu/online"));
}

Cores discover_cores(const Roots& roots, const std::vector<int>& online) {
  std::set<std::string> physical;
  for (const int cpu : online) {
    const fs::path topology =
        fs::path(roots.sys) / "devices/system/cpu" / ("cpu" + std::to_string(cpu)) / "topology";
    const std::string siblings = read_line(topology / "thread_siblings_list");
    physical.insert(siblings.empty() ? std::to_string(cpu) : siblings);
  }
  return {.physical = static_cast<int>(physical.size()),
          .logical = static_cast<int>(online.size()),
          .usable = usable_cores(roots)};
}

// "48K" and the like.
int64_t parse_size(const std::string& text) {
  const int64_t number = leading_integer(text).value_or(0);
  const char unit = text.empty() ? ' ' : text.back();
  return number << (unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : 0);
}

std::vector<Cache> discover_caches(const Roots& roots, const std::vector<int>& online) {
  // Level, type, bytes, sharers -> the instances, each known by its list of CPUs.
  std::map<std::tuple<int64_t, std::string, int64_t, size_t>, std::set<std::string>> kinds;
  for (const int cpu : online) {
    const fs::path caches =
        fs::path(roots.sys) / "devices/system/cpu" / ("cpu" + std::to_string(cpu)) / "cache";
    for (const fs::path& cache : list_directory(caches)) {
      std::string type = read_line(cache / "type");
      if (type != "Data" && type != "Unified") continue;
      type[0] = static_cast<char>(std::tolower(type[0]));
      const std::string sharers = read_line(cache / "shared_cpu_list");
      kinds[{read_integer(cache / "level", 0),
             type,
             parse_size(read_line(cache / "size")),
             std::max<size_t>(parse_list(sharers).size(), 1)}]
          .insert(sharers);
    }
  }
  std::vector<Cache> caches;
  for (const auto& [kind, instances] : kinds) {
    const auto& [level, type, bytes, shared_by] = kind;
    caches.push_back({.level = static_cast<int>(level),
                      .type = type,
                      .bytes = bytes,
                      .shared_by = static_cast<int>(shared_by),
                      .instances = static_cast<int>(instances.size())});
  }
  return caches;
}

std::vector<NumaNode> discover_numa_nodes(const Roots& roots) {
  const fs::path nodes = fs::path(roots.sys) / "devices/system/node";
  std::vector<NumaNode> found;
  for (const int index : parse_list(read_line(nodes / "online"))) {
    const fs::path node = nodes / ("node" + std::to_string(index));
    found.push_back({.index = index,
                     .cpus = parse_list(read_line(node / "cpulist")),
                     .memory_bytes = read_kilobytes(node / "meminfo", "MemTotal")});
  }
  return found;
}

// "" where the kernel does not say (as on most ARM machines).
std::string cpu_model(const Roots& roots) {
  std::ifstream file(fs::path(roots.proc) / "cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "";
}

// ---- Devices ----

std::map<std::string, std::vector<std::string>> addresses_by_interface() {
  std::map<std::string, std::vector<std::string>> addresses;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) == -1) return addresses;
  for (const ifaddrs* entry = all; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    char text[INET6_ADDRSTRLEN] = "";
    const int family = entry->ifa_addr->sa_family;
    if (family == AF_INET) {
      const auto* address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
      inet_ntop(family, &address->sin_addr, text, sizeof(text));
    } else if (family == AF_INET6) {
      const auto* address = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
      inet_ntop(family, &address->sin6_addr, text, sizeof(text));
    } else {
      continue;
    }
    addresses[entry->ifa_name].push_back(text);
  }
  freeifaddrs(all);
  return addresses;
}

std::vector<Nic> discover_nics(const Roots& roots) {
  auto addresses = addresses_by_interface();
  std::vector<Nic> nics;
  for (const fs::path& interface : list_directory(fs::path(roots.sys) / "class/net")) {
    const int64_t type = read_integer(interface / "type", -1);
    if (type < 0 || type == ARPHRD_LOOPBACK) continue;
    const std::string name = interface.filename();
    const std::string state = read_line(interface / "operstate");
    const int64_t flags = read_integer(interface / "flags", 0);
    const std::string pci = pci_above(interface / "device");
    nics.push_back({
        .name = name,
        .speed_mbps = std::max<int64_t>(read_integer(interface / "speed", 0), 0),
        .mtu = static_cast<int>(read_integer(interface / "mtu", 0)),
        .addresses = addresses[name],
        // Drivers that do not tell their state (tun, dummy) have only the administrator's word.
        .is_up = state == "up" || (state == "unknown" && (flags & IFF_UP) != 0),
        .numa_node = numa_node_of_pci(roots, pci),
        .pci = pci,
    });
  }
  return nics;
}

}  // namespace

int usable_cores(const Roots& roots) {
  const double quota = std::ceil(cgroup_quota(roots));
  const int affinity = affinity_count();
  return quota < affinity ? std::max(static_cast<int>(quota), 1) : affinity;
}

std::string describe_machine(const Roots& roots) {
  const std::vector<int> online = online_cpus(roots);
  const std::string model = cpu_model(roots);
  std::ostringstream text;
  text << (model.empty() ? "unnamed CPU" : model) << ", " << usable_cores(roots) << " of "
       << online.size() << " hardware threads";
  for (const Cache& cache : discover_caches(roots, online)) {
    if (cache.level > 1) text << ", L" << cache.level << " " << (cache.bytes >> 10) << " KiB";
  }
  const size_t nodes = discover_numa_nodes(roots).size();
  text << ", " << nodes << (nodes == 1 ? " NUMA node" : " NUMA nodes");
  return text.str();
}

Topology discover(const Roots& roots) {
  const fs::path proc(roots.proc);
  const std::vector<int> online = online_cpus(roots);
  Topology topology;
  topology.host_name = read_line(proc / "sys/kernel/hostname");
  topology.boot_id = read_line(proc / "sys/kernel/random/boot_id");
  topology.cores = discover_cores(roots, online);
  topology.caches = discover_caches(roots, online);
  topology.numa_nodes = discover_numa_nodes(roots);
  topology.memory = {.total_bytes = read_kilobytes(proc / "meminfo", "MemTotal"),
                     .available_bytes = read_kilobytes(proc / "meminfo", "MemAvailable")};
  topology.nics = discover_nics(roots);
  topology.rdma = discover_rdma(roots);
  topology.gpudirect = gpudirect_module(roots);
  topology.gpus = discover_gpus(roots.nvml_library, &topology.gpu_note);
  for (Gpu& gpu : topology.gpus) {
    gpu.numa_node = numa_node_of_pci(roots, gpu.pci);
    gpu.pcie_mbps = pcie_mbps(roots, gpu.pci);
  }
  return topology;
}

}  // namespace dpt
