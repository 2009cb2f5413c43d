// RDMA adapters as /sys/class/infiniband tells them, whatever they are: InfiniBand, RoCE, eRDMA,
// EFA.
#include <algorithm>
#include <array>

#include "topology/sysfs.hpp"
#include "topology/topology.hpp"

namespace dpt {
namespace {

namespace fs = std::filesystem;

// "4: ACTIVE" -> "ACTIVE".
std::string word_after_colon(const std::string& text) {
  const size_t colon = text.find(": ");
  return colon == std::string::npos ? text : text.substr(colon + 2);
}

// "200 Gb/sec (4X HDR)" -> 200000, "2.5 Gb/sec (1X SDR)" -> 2500.
int64_t rate_mbps(const std::string& text) {
  const int64_t whole = leading_integer(text).value_or(0);
  const size_t dot = text.find('.');
  const bool has_tenths = dot != std::string::npos && dot + 1 < text.find(' ');
  const int64_t tenths = has_tenths ? leading_integer(text.substr(dot + 1, 1)).value_or(0) : 0;
  return std::max<int64_t>(whole, 0) * 1000 + tenths * 100;
}

bool is_unset(const std::string& gid) { return gid.find_first_not_of("0:") == std::string::npos; }

std::vector<RdmaGid> gids_of(const fs::path& port) {
  std::vector<RdmaGid> gids;
  for (const fs::path& file : list_directory(port / "gids")) {
    const std::string name = file.filename();
    const std::string gid = read_line(file);
    if (gid.empty() || is_unset(gid)) continue;
    // The kernel refuses to read the attributes of entries that are not in use.
    gids.push_back({.index = static_cast<int>(leading_integer(name).value_or(0)),
                    .gid = gid,
                    .type = read_line(port / "gid_attrs/types" / name),
                    .interface = read_line(port / "gid_attrs/ndevs" / name)});
  }
  std::sort(gids.begin(), gids.end(), [](const RdmaGid& a, const RdmaGid& b) {
    return a.index < b.index;
  });
  return gids;
}

std::vector<RdmaPort> ports_of(const fs::path& device) {
  std::vector<RdmaPort> ports;
  for (const fs::path& port : list_directory(device / "ports")) {
    ports.push_back(
        {.number = static_cast<int>(leading_integer(port.filename().string()).value_or(0)),
         .state = word_after_colon(read_line(port / "state")),
         .link_layer = read_line(port / "link_layer"),
         .rate_mbps = rate_mbps(read_line(port / "rate")),
         .gids = gids_of(port)});
  }
  return ports;
}

}  // namespace

std::vector<RdmaDevice> discover_rdma(const Roots& roots) {
  std::vector<RdmaDevice> devices;
  for (const fs::path& device : list_directory(fs::path(roots.sys) / "class/infiniband")) {
    std::error_code error;
    const fs::path driver = fs::canonical(device / "device/driver", error);
    const std::string pci = pci_above(device / "device");
    devices.push_back({.name = device.filename(),
                       .driver = error ? "" : driver.filename().string(),
                       .pci = pci,
                       .numa_node = numa_node_of_pci(roots, pci),
                       .ports = ports_of(device)});
  }
  return devices;
}

std::string gpudirect_module(const Roots& roots) {
  for (const char* name : {"nvidia_peermem", "nv_peer_mem"}) {
    std::error_code error;
    if (fs::exists(fs::path(roots.sys) / "module" / name, error)) return name;
  }
  return "";
}

}  // namespace dpt
