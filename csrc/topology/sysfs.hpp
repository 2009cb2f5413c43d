// Reading the small files in which the kernel describes devices.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "topology/topology.hpp"

namespace dpt {

// The first line; "" when the file is absent or its driver refuses (as `speed` of a link down).
std::string read_line(const std::filesystem::path& path);

// The number that `text` starts with after blanks, in base 10 or, after "0x", 16.
std::optional<int64_t> leading_integer(const std::string& text);

int64_t read_integer(const std::filesystem::path& path, int64_t otherwise);

// The entries in order of their names; none when there is no such folder.
std::vector<std::filesystem::path> list_directory(const std::filesystem::path& path);

// The nearest PCI device at or above a device's folder; "" for one that is not on PCI. (A virtio
// interface's own device is no PCI device.)
std::string pci_above(const std::filesystem::path& device);

// The rate that one direction of a PCI Express device's link carries at its full speed and width; 0
// when it has none, as behind a hypervisor.
int64_t pcie_mbps(const Roots& roots, const std::string& pci);

int numa_node_of_pci(const Roots& roots, const std::string& pci);

}  // namespace dpt
