// GPUs and their links, from the driver's management library. The library is opened at run time, so
// the core needs no CUDA toolkit to build and no driver to run.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>

#include "base/error.hpp"
#include "topology/topology.hpp"

namespace dpt {
namespace {

// The part of NVML's documented C interface that is used here, under its own names and values.
extern "C" {
struct nvmlDevice_st;
typedef nvmlDevice_st* nvmlDevice_t;
typedef struct {
  char busIdLegacy[16];
  unsigned int domain;
  unsigned int bus;
  unsigned int device;
  unsigned int pciDeviceId;
  unsigned int pciSubSystemId;
  char busId[32];
} nvmlPciInfo_t;
typedef struct {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
} nvmlMemory_t;
}
using nvmlReturn_t = int;
constexpr nvmlReturn_t NVML_SUCCESS = 0;
constexpr unsigned int NVML_NVLINK_DEVICE_TYPE_SWITCH = 2;

constexpr unsigned int kMaxNvlinks = 36;  // twice what an H100 has
constexpr size_t kTextBytes = 96;         // NVML's longest UUIDs and names

class Nvml {
 public:
  explicit Nvml(const std::string& library) : library_(dlopen(library.c_str(), RTLD_NOW)) {
    if (library_ == nullptr) throw Error(DPT_ERR_SYSTEM, "no NVIDIA driver (" + library + ")");
    check("nvmlInit_v2", find<nvmlReturn_t()>("nvmlInit_v2")());
  }
  // The library stays loaded: others in the process use it too.
  ~Nvml() { try_call("nvmlShutdown"); }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // Calls a function that older drivers may lack; whether it succeeded.
  template <typename... Args>
  bool try_call(const char* name, Args... args) const {
    const auto function = reinterpret_cast<nvmlReturn_t (*)(Args...)>(dlsym(library_, name));
    return function != nullptr && function(args...) == NVML_SUCCESS;
  }

  template <typename... Args>
  void call(const char* name, Args... args) const {
    check(name, find<nvmlReturn_t(Args...)>(name)(args...));
  }

 private:
  template <typename Function>
  Function* find(const char* name) const {
    void* symbol = dlsym(library_, name);
    if (symbol == nullptr) throw Error(DPT_ERR_SYSTEM, std::string("NVML lacks ") + name);
    return reinterpret_cast<Function*>(symbol);
  }

  void check(const char* name, nvmlReturn_t result) const {
    if (result == NVML_SUCCESS) return;
    const char* text = find<const char*(nvmlReturn_t)>("nvmlErrorString")(result);
    throw Error(DPT_ERR_SYSTEM, std::string(name) + " failed: " + text);
  }

  void* library_;
};

// As sysfs spells it: "0000:3b:00.0".
std::string pci_address(const nvmlPciInfo_t& pci) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%04x:%02x:%02x.0", pci.domain, pci.bus, pci.device);
  return text.data();
}

Gpu describe_gpu(const Nvml& nvml, nvmlDevice_t device, int index) {
  std::array<char, kTextBytes> uuid{};
  std::array<char, kTextBytes> name{};
  nvmlPciInfo_t pci{};
  nvmlMemory_t memory{};
  nvml.call("nvmlDeviceGetUUID", device, uuid.data(), static_cast<unsigned int>(uuid.size()));
  nvml.call("nvmlDeviceGetName", device, name.data(), static_cast<unsigned int>(name.size()));
  nvml.call("nvmlDeviceGetPciInfo_v3", device, &pci);
  // Absent where GPU and CPU share one memory.
  const bool has_memory = nvml.try_call("nvmlDeviceGetMemoryInfo", device, &memory);
  return {.index = index,
          .uuid = uuid.data(),
          .name = name.data(),
          .memory_bytes = has_memory ? static_cast<int64_t>(memory.total) : 0,
          .pci = pci_address(pci),
          .numa_node = -1,
          .links = {}};
}

// The active NVLinks of one GPU, by what is at the other end.
struct NvlinkEnds {
  std::map<std::string, int> to_pci;  // PCI address -> links
  int to_switch = 0;
};

NvlinkEnds find_nvlink_ends(const Nvml& nvml, nvmlDevice_t device) {
  NvlinkEnds ends;
  for (unsigned int link = 0; link < kMaxNvlinks; ++link) {
    unsigned int is_active = 0;
    if (!nvml.try_call("nvmlDeviceGetNvLinkState", device, link, &is_active) || is_active == 0) {
      continue;
    }
    unsigned int type = 0;
    nvmlPciInfo_t remote{};
    if (nvml.try_call("nvmlDeviceGetNvLinkRemoteDeviceType", device, link, &type) &&
        type == NVML_NVLINK_DEVICE_TYPE_SWITCH) {
      ++ends.to_switch;
    } else if (nvml.try_call("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, link, &remote)) {
      ++ends.to_pci[pci_address(remote)];
    }
  }
  return ends;
}

PciDistance pci_distance(const Nvml& nvml, nvmlDevice_t a, nvmlDevice_t b) {
  unsigned int level = 0;
  if (!nvml.try_call("nvmlDeviceGetTopologyCommonAncestor", a, b, &level)) {
    return PciDistance::kUnknown;
  }
  switch (level) {
    case 0:
      return PciDistance::kSameBoard;
    case 10:
      return PciDistance::kSingleSwitch;
    case 20:
      return PciDistance::kMultipleSwitches;
    case 30:
      return PciDistance::kHostBridge;
    case 40:
      return PciDistance::kNumaNode;
    case 50:
      return PciDistance::kSystem;
    default:
      return PciDistance::kUnknown;
  }
}

std::vector<Gpu> list_gpus(const Nvml& nvml) {
  unsigned int count = 0;
  nvml.call("nvmlDeviceGetCount_v2", &count);
  std::vector<nvmlDevice_t> devices(count);
  std::vector<NvlinkEnds> ends(count);
  std::vector<Gpu> gpus;
  for (unsigned int i = 0; i < count; ++i) {
    nvml.call("nvmlDeviceGetHandleByIndex_v2", i, &devices[i]);
    gpus.push_back(describe_gpu(nvml, devices[i], static_cast<int>(i)));
    ends[i] = find_nvlink_ends(nvml, devices[i]);
  }
  for (unsigned int i = 0; i < count; ++i) {
    for (unsigned int j = 0; j < count; ++j) {
      if (i == j) continue;
      const auto direct = ends[i].to_pci.find(gpus[j].pci);
      const int num_direct = direct == ends[i].to_pci.end() ? 0 : direct->second;
      gpus[i].links.push_back({
          .peer = gpus[j].index,
          .nvlinks = num_direct + std::min(ends[i].to_switch, ends[j].to_switch),
          .distance = pci_distance(nvml, devices[i], devices[j]),
      });
    }
  }
  return gpus;
}

}  // namespace

std::vector<Gpu> discover_gpus(const std::string& nvml_library, std::string* note) {
  try {
    std::vector<Gpu> gpus = list_gpus(Nvml(nvml_library));
    *note = gpus.empty() ? "the NVIDIA driver reports no GPU" : "";
    return gpus;
  } catch (const Error& error) {
    *note = error.what();
    return {};
  }
}

}  // namespace dpt
