// The rate of a PCI Express link, from the files in which the kernel describes it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "topology/sysfs.hpp"

namespace dpt {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPort = "0000:15:01.0";
constexpr const char* kDevice = "0000:18:00.0";

// A device below a port, as sysfs has them; removed with the test.
class PcieRate : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "dpt-pcie-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    device_ = root_ / "sys/devices/pci0000:15" / kPort / kDevice;
    fs::create_directories(device_);
    fs::create_directories(root_ / "sys/bus/pci/devices");
    fs::create_directory_symlink(device_, root_ / "sys/bus/pci/devices" / kDevice);
  }
  void TearDown() override { fs::remove_all(root_); }

  static void describe(const fs::path& folder, const char* speed, const char* width) {
    std::ofstream(folder / "max_link_speed") << speed << "\n";
    std::ofstream(folder / "max_link_width") << width << "\n";
  }
  int64_t rate() const {
    Roots roots;
    roots.sys = root_ / "sys";
    return pcie_mbps(roots, kDevice);
  }

  fs::path root_;
  fs::path device_;
};

TEST_F(PcieRate, FollowsGenerationAndWidth) {
  describe(device_, "32.0 GT/s PCIe", "16");
  EXPECT_EQ(rate(), 32000 * 16 * 128 / 130);  // 63 GB/s
  describe(device_, "16.0 GT/s PCIe", "16");
  EXPECT_EQ(rate(), 16000 * 16 * 128 / 130);
  describe(device_, "2.5 GT/s", "1");
  EXPECT_EQ(rate(), 2000);
  describe(device_, "5.0 GT/s PCIe", "4");
  EXPECT_EQ(rate(), 16000);
}

TEST_F(PcieRate, IsNoMoreThanTheSlotHas) {
  describe(device_, "32.0 GT/s PCIe", "16");
  describe(device_.parent_path(), "16.0 GT/s PCIe", "8");
  EXPECT_EQ(rate(), 16000 * 8 * 128 / 130);
  describe(device_.parent_path(), "64.0 GT/s PCIe", "16");
  EXPECT_EQ(rate(), 32000 * 16 * 128 / 130);
}

TEST_F(PcieRate, IsUnknownWhereTheKernelDoesNotSay) {
  EXPECT_EQ(rate(), 0);
  describe(device_, "Unknown", "255");
  EXPECT_EQ(rate(), 0);
  EXPECT_EQ(pcie_mbps(Roots{.sys = root_ / "sys"}, "0000:99:00.0"), 0);
  EXPECT_EQ(pcie_mbps(Roots{.sys = root_ / "sys"}, ""), 0);
}

}  // namespace
}  // namespace dpt
