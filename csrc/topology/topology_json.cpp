// Topology <-> JSON. Each struct's fields are listed once, in a `visit` that both directions use.
#include <array>
#include <limits>
#include <set>
#include <string_view>

#include "base/error.hpp"
#include "base/json.hpp"
#include "topology/topology.hpp"

namespace dpt {
namespace {

constexpr int kVersion = 3;

// In the order of PciDistance.
constexpr std::array<std::string_view, 7> kDistances = {"unknown",
                                                        "same_board",
                                                        "single_switch",
                                                        "multiple_switches",
                                                        "host_bridge",
                                                        "numa_node",
                                                        "system"};

template <typename Archive>
void visit(Archive& archive, Cores& cores) {
  archive.field("physical", cores.physical);
  archive.field("logical", cores.logical);
  archive.field("usable", cores.usable);
}

template <typename Archive>
void visit(Archive& archive, Cache& cache) {
  archive.field("level", cache.level);
  archive.field("type", cache.type);
  archive.field("bytes", cache.bytes);
  archive.field("shared_by", cache.shared_by);
  archive.field("instances", cache.instances);
}

template <typename Archive>
void visit(Archive& archive, NumaNode& node) {
  archive.field("index", node.index);
  archive.field("cpus", node.cpus);
  archive.field("memory_bytes", node.memory_bytes);
}

template <typename Archive>
void visit(Archive& archive, Memory& memory) {
  archive.field("total_bytes", memory.total_bytes);
  archive.field("available_bytes", memory.available_bytes);
}

template <typename Archive>
void visit(Archive& archive, Nic& nic) {
  archive.field("name", nic.name);
  archive.field("speed_mbps", nic.speed_mbps);
  archive.field("mtu", nic.mtu);
  archive.field("addresses", nic.addresses);
  archive.field("is_up", nic.is_up);
  archive.node_field("numa_node", nic.numa_node);
  archive.field("pci", nic.pci);
}

template <typename Archive>
void visit(Archive& archive, RdmaGid& gid) {
  archive.field("index", gid.index);
  archive.field("gid", gid.gid);
  archive.field("type", gid.type);
  archive.field("interface", gid.interface);
}

template <typename Archive>
void visit(Archive& archive, RdmaPort& port) {
  archive.field("number", port.number);
  archive.field("state", port.state);
  archive.field("link_layer", port.link_layer);
  archive.field("rate_mbps", port.rate_mbps);
  archive.field("gids", port.gids);
}

template <typename Archive>
void visit(Archive& archive, RdmaDevice& device) {
  archive.field("name", device.name);
  archive.field("driver", device.driver);
  archive.field("pci", device.pci);
  archive.node_field("numa_node", device.numa_node);
  archive.field("ports", device.ports);
}

template <typename Archive>
void visit(Archive& archive, GpuLink& link) {
  archive.field("peer", link.peer);
  archive.field("nvlinks", link.nvlinks);
  archive.field("distance", link.distance);
  archive.field("measured_mbps", link.measured_mbps);
}

template <typename Archive>
void visit(Archive& archive, Gpu& gpu) {
  archive.field("index", gpu.index);
  archive.field("uuid", gpu.uuid);
  archive.field("name", gpu.name);
  archive.field("memory_bytes", gpu.memory_bytes);
  archive.field("pci", gpu.pci);
  archive.field("pcie_mbps", gpu.pcie_mbps);
  archive.node_field("numa_node", gpu.numa_node);
  archive.field("links", gpu.links);
}

template <typename Archive>
void visit(Archive& archive, Topology& topology) {
  archive.version();
  archive.field("host_name", topology.host_name);
  archive.field("boot_id", topology.boot_id);
  archive.field("cores", topology.cores);
  archive.field("caches", topology.caches);
  archive.field("numa_nodes", topology.numa_nodes);
  archive.field("memory", topology.memory);
  archive.field("nics", topology.nics);
  archive.field("rdma", topology.rdma);
  archive.field("gpudirect", topology.gpudirect);
  archive.field("gpus", topology.gpus);
  archive.field("gpu_note", topology.gpu_note);
}

class Writer {
 public:
  template <typename T>
  void field(const char* name, T& member) {
    object_.push_back({name, to_json(member)});
  }
  void node_field(const char* name, int& node) { field(name, node); }
  void version() { object_.push_back({"version", json::Value{int64_t{kVersion}}}); }

  template <typename T>
  static json::Value to_json(T& member) {
    if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::string>) {
      return {member};
    } else if constexpr (std::is_integral_v<T>) {
      return {int64_t{member}};
    } else if constexpr (std::is_enum_v<T>) {
      return {std::string(kDistances[static_cast<size_t>(member)])};
    } else {
      Writer writer;
      visit(writer, member);
      return {std::move(writer.object_)};
    }
  }
  template <typename T>
  static json::Value to_json(std::vector<T>& members) {
    json::Array array;
    for (T& member : members) array.push_back(to_json(member));
    return {std::move(array)};
  }

 private:
  json::Object object_;
};

class Reader {
 public:
  template <typename T>
  static void read(const json::Value& value, const std::string& path, T& member) {
    if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::string>) {
      member = get<T>(value, path);
    } else if constexpr (std::is_integral_v<T>) {
      member = read_integer<T>(value, path, 0);
    } else if constexpr (std::is_enum_v<T>) {
      member = read_distance(value, path);
    } else {
      Reader reader(get<json::Object>(value, path), path);
      visit(reader, member);
      reader.expect_no_more();
    }
  }
  template <typename T>
  static void read(const json::Value& value, const std::string& path, std::vector<T>& members) {
    const auto& array = get<json::Array>(value, path);
    members.resize(array.size());
    for (size_t i = 0; i < array.size(); ++i) {
      read(array[i], path + "[" + std::to_string(i) + "]", members[i]);
    }
  }

  template <typename T>
  void field(const char* name, T& member) {
    read(find(name), path_of(name), member);
  }
  void node_field(const char* name, int& node) {
    node = read_integer<int>(find(name), path_of(name), -1);
  }
  void version() {
    const auto version = read_integer<int>(find("version"), path_of("version"), 0);
    if (version != kVersion) {
      fail(path_of("version"),
           "this release reads version " + std::to_string(kVersion) + ", found " +
               std::to_string(version));
    }
  }

  [[noreturn]] static void fail(const std::string& path, const std::string& what) {
    throw Error(DPT_ERR_INVALID,
                "topology field " + (path.empty() ? "(root)" : path) + ": " + what);
  }

 private:
  Reader(const json::Object& object, const std::string& path) : object_(object), path_(path) {}

  std::string path_of(const std::string& name) const {
    return path_.empty() ? name : path_ + "." + name;
  }

  const json::Value& find(const char* name) {
    known_.insert(name);
    for (const auto& [key, value] : object_) {
      if (key == name) return value;
    }
    fail(path_of(name), "is missing");
  }

  void expect_no_more() const {
    for (const auto& [key, value] : object_) {
      if (!known_.contains(key)) fail(path_of(key), "is not a field of a topology");
    }
  }

  template <typename T>
  static const T& get(const json::Value& value, const std::string& path) {
    if (const T* data = value.get_if<T>()) return *data;
    fail(path, std::string("expected ") + json::Value{T{}}.kind() + ", found " + value.kind());
  }

  template <typename T>
  static T read_integer(const json::Value& value, const std::string& path, T least) {
    const int64_t integer = get<int64_t>(value, path);
    if (integer < least || integer > std::numeric_limits<T>::max()) {
      fail(path,
           "expected an integer from " + std::to_string(least) + " to " +
               std::to_string(std::numeric_limits<T>::max()) + ", found " +
               std::to_string(integer));
    }
    return static_cast<T>(integer);
  }

  static PciDistance read_distance(const json::Value& value, const std::string& path) {
    const auto& name = get<std::string>(value, path);
    std::string names;
    for (size_t i = 0; i < kDistances.size(); ++i) {
      if (name == kDistances[i]) return static_cast<PciDistance>(i);
      names += (i > 0 ? ", " : "") + std::string(kDistances[i]);
    }
    fail(path, "expected one of " + names + ", found \"" + name + "\"");
  }

  const json::Object& object_;
  std::string path_;
  std::set<std::string_view> known_;
};

// Checks what the types cannot say: GPU indices are unique, and links lead to another GPU, once.
void check_gpus(const std::vector<Gpu>& gpus) {
  std::set<int> indices;
  for (size_t i = 0; i < gpus.size(); ++i) {
    if (!indices.insert(gpus[i].index).second) {
      Reader::fail("gpus[" + std::to_string(i) + "].index",
                   "GPU " + std::to_string(gpus[i].index) + " appears twice");
    }
  }
  for (size_t i = 0; i < gpus.size(); ++i) {
    std::set<int> peers = {gpus[i].index};
    for (size_t j = 0; j < gpus[i].links.size(); ++j) {
      const int peer = gpus[i].links[j].peer;
      if (indices.contains(peer) && peers.insert(peer).second) continue;
      Reader::fail("gpus[" + std::to_string(i) + "].links[" + std::to_string(j) + "].peer",
                   "expected the index of another GPU, each once, found " + std::to_string(peer));
    }
  }
}

}  // namespace

std::string dump_topology(const Topology& topology) {
  Topology copy = topology;  // visit() takes what it may also fill
  return json::dump(Writer::to_json(copy));
}

Topology load_topology(const std::string& text) {
  Topology topology;
  Reader::read(json::parse(text), "", topology);
  check_gpus(topology.gpus);
  return topology;
}

}  // namespace dpt
