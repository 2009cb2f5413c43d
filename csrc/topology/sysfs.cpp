#include "topology/sysfs.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>

namespace dpt {
namespace {

namespace fs = std::filesystem;

bool is_pci_address(const std::string& name) {  // "0000:3b:00.0"
  const size_t colon = name.find(':');
  return colon != std::string::npos && colon >= 4 && name.size() == colon + 8 &&
         name[colon + 3] == ':' && name[colon + 6] == '.';
}

}  // namespace

std::string read_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<int64_t> leading_integer(const std::string& text) {
  const size_t start = text.find_first_not_of(" \t");
  if (start == std::string::npos) return std::nullopt;
  const bool is_hex = text.compare(start, 2, "0x") == 0;
  const char* first = text.data() + start + (is_hex ? 2 : 0);
  int64_t value = 0;
  const auto result = std::from_chars(first, text.data() + text.size(), value, is_hex ? 16 : 10);
  if (result.ec != std::errc()) return std::nullopt;
  return value;
}

int64_t read_integer(const fs::path& path, int64_t otherwise) {
  return leading_integer(read_line(path)).value_or(otherwise);
}

std::vector<fs::path> list_directory(const fs::path& path) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    entries.push_back(it->path());
  }
  std::sort(entries.begin(), entries.end());
  return entries;
}

int numa_node_of_pci(const Roots& roots, const std::string& pci) {
  if (pci.empty()) return -1;
  const fs::path device = fs::path(roots.sys) / "bus/pci/devices" / pci;
  return static_cast<int>(read_integer(device / "numa_node", -1));
}

namespace {

// Transfers a second and lane, in millions; the file says "16.0 GT/s PCIe", "2.5 GT/s", "Unknown".
int64_t lane_mtps(const fs::path& device) {
  const std::string text = read_line(device / "max_link_speed");
  const int64_t whole = leading_integer(text).value_or(0);
  return whole == 2 ? 2500 : whole * 1000;
}

}  // namespace

int64_t pcie_mbps(const Roots& roots, const std::string& pci) {
  if (pci.empty()) return 0;
  std::error_code error;
  const fs::path device = fs::canonical(fs::path(roots.sys) / "bus/pci/devices" / pci, error);
  int64_t speed = lane_mtps(device);
  int64_t width = read_integer(device / "max_link_width", 0);
  if (error || speed <= 0 || width <= 0 || width > 32) return 0;
  const fs::path port = device.parent_path();
  if (lane_mtps(port) > 0) speed = std::min(speed, lane_mtps(port));
  const int64_t slot_width = read_integer(port / "max_link_width", 0);
  if (slot_width > 0 && slot_width <= 32) width = std::min(width, slot_width);
  // Up to generation 2 eight bits travel as ten, from 3 on 128 as 130; 6 is a little below.
  return speed <= 5000 ? speed * width * 8 / 10 : speed * width * 128 / 130;
}

std::string pci_above(const fs::path& device) {
  std::error_code error;
  std::string pci;
  for (const fs::path& part : fs::canonical(device, error)) {
    if (is_pci_address(part.string())) pci = part.string();
  }
  return pci;
}

}  // namespace dpt
