// The parts of a machine, as plain data. They are found by discover(), or loaded from JSON so that
// tests and the tuner's dry runs can use machines that are not there.
//
// Unknown is -1 for a NUMA node, 0 for a number and "" for a string.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dpt {

struct Cores {
  int physical = 0;
  int logical = 0;  // online hardware threads
  int usable = 0;   // what this process may use: see usable_cores()
};

// Caches that differ only in the cores they belong to are one entry.
struct Cache {
  int level = 0;
  std::string type;   // "data" or "unified"
  int64_t bytes = 0;  // of one instance
  int shared_by = 0;  // hardware threads that share one instance
  int instances = 0;
};

struct NumaNode {
  int index = 0;
  std::vector<int> cpus;
  int64_t memory_bytes = 0;
};

struct Memory {
  int64_t total_bytes = 0;
  int64_t available_bytes = 0;
};

struct Nic {
  std::string name;
  int64_t speed_mbps = 0;
  int mtu = 0;
  std::vector<std::string> addresses;  // IPv4 and IPv6, numeric
  bool is_up = false;
  int numa_node = -1;
  std::string pci;  // "0000:3b:00.0"; "" for a virtual interface
};

struct RdmaGid {
  int index = 0;
  std::string gid;        // eight groups of four hexadecimal digits
  std::string type;       // "RoCE v2", "IB/RoCE v1"
  std::string interface;  // the network interface it belongs to
};

struct RdmaPort {
  int number = 0;
  std::string state;       // "ACTIVE", "DOWN", ...
  std::string link_layer;  // "InfiniBand", "Ethernet", "Unspecified"
  int64_t rate_mbps = 0;
  std::vector<RdmaGid> gids;  // those in use
};

struct RdmaDevice {
  std::string name;    // "mlx5_0"
  std::string driver;  // "mlx5_core", "erdma", "efa"
  std::string pci;
  int numa_node = -1;
  std::vector<RdmaPort> ports;
};

// How far apart two GPUs are on PCIe, nearest first.
enum class PciDistance {
  kUnknown,
  kSameBoard,
  kSingleSwitch,
  kMultipleSwitches,
  kHostBridge,
  kNumaNode,
  kSystem,
};

struct GpuLink {
  int peer = 0;     // the other GPU's index
  int nvlinks = 0;  // active NVLinks to it, direct or through NVSwitch
  PciDistance distance = PciDistance::kUnknown;
  int64_t measured_mbps = 0;  // of copies to it; discover() measures nothing
};

struct Gpu {
  int index = 0;  // NVML's, in PCI order; CUDA's order may differ, so match devices by UUID
  std::string uuid;
  std::string name;
  int64_t memory_bytes = 0;
  std::string pci;
  int64_t pcie_mbps = 0;  // one direction of its PCIe link at full speed
  int numa_node = -1;
  std::vector<GpuLink> links;  // one per other GPU
};

struct Topology {
  std::string host_name;
  std::string boot_id;
  Cores cores;
  std::vector<Cache> caches;
  std::vector<NumaNode> numa_nodes;
  Memory memory;
  std::vector<Nic> nics;
  std::vector<RdmaDevice> rdma;
  std::string gpudirect;  // the module by which RDMA devices reach GPU memory, if one is loaded
  std::vector<Gpu> gpus;
  std::string gpu_note;  // why `gpus` is empty
};

// Discovery looks below these. Tests point it at fake trees.
struct Roots {
  std::string sys = "/sys";
  std::string proc = "/proc";
  std::string nvml_library = "libnvidia-ml.so.1";
};

// Never fails for want of a file or a driver: what cannot be found stays unknown.
Topology discover(const Roots& roots = {});

// CPUs this process may use at once: its affinity mask, limited by the cgroup (v1 or v2) CPU quota
// rounded up; at least 1.
int usable_cores(const Roots& roots = {});

// Tells what the speed of this machine's cores and memory depends on, in one line for people and as
// a key: "Intel(R) Xeon(R) ..., 2 of 4 hardware threads, L2 1024 KiB, L3 33792 KiB, 1 NUMA node".
std::string describe_machine(const Roots& roots = {});

// The GPUs NVML sees and their links, without NUMA nodes; else `note` says why there are none.
std::vector<Gpu> discover_gpus(const std::string& nvml_library, std::string* note);

// RDMA devices in order of their names, and GPUDirect's kernel module.
std::vector<RdmaDevice> discover_rdma(const Roots& roots);
std::string gpudirect_module(const Roots& roots);

// JSON text, the same fields as above. Loading throws Error(DPT_ERR_INVALID) that names the wrong,
// missing or unknown field by its path, such as "gpus[1].links[0].peer".
std::string dump_topology(const Topology& topology);
Topology load_topology(const std::string& text);

// nullptr when GPU `from` has no entry for `to`.
const GpuLink* find_link(const Topology& topology, int from, int to);
// Whether there are several GPUs and NVLink joins each two of them.
bool has_full_nvlink(const Topology& topology);

}  // namespace dpt
