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

std::string pci_above(const fs::path& device) {
  std::error_code error;
  std::string pci;
  for (const fs::path& part : fs::canonical(device, error)) {
    if (is_pci_address(part.string())) pci = part.string();
  }
  return pci;
}

}  // namespace dpt
