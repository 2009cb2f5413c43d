// Plans on the device: which kernel at which size, and that lines never overflow.
#include <gtest/gtest.h>

#include "tuner/choose_device.hpp"

namespace dpt {
namespace {

using cuda::Layout;

constexpr Layout kLayout = Layout::of(4, 64 << 10);

TEST(ChooseDevice, SmallMessagesTravelInLines) {
  for (const Collective collective :
       {DPT_ALL_REDUCE, DPT_ALL_GATHER, DPT_REDUCE_SCATTER, DPT_ALL_TO_ALL, DPT_BROADCAST}) {
    const DevicePlan plan = choose_device(
        {.collective = collective, .bytes = 8192, .layout = kLayout, .not_native = ""});
    EXPECT_STREQ(plan.algorithm, "low_latency");
    EXPECT_EQ(plan.grid.channels * plan.grid.threads, 1024);
  }
}

TEST(ChooseDevice, MiddleSizesTravelInPackets) {
  for (const Collective collective :
       {DPT_ALL_REDUCE, DPT_ALL_GATHER, DPT_REDUCE_SCATTER, DPT_ALL_TO_ALL}) {
    const DevicePlan plan = choose_device(
        {.collective = collective, .bytes = 512 << 10, .layout = kLayout, .not_native = ""});
    EXPECT_STREQ(plan.algorithm, "packet");
  }
}

TEST(ChooseDevice, LargeOnesArePushed) {
  const size_t large = 64 << 20;
  EXPECT_STREQ(
      choose_device(
          {.collective = DPT_ALL_REDUCE, .bytes = large, .layout = kLayout, .not_native = ""})
          .algorithm,
      "two_shot");
  const DevicePlan plan = choose_device(
      {.collective = DPT_ALL_GATHER, .bytes = large, .layout = kLayout, .not_native = ""});
  EXPECT_STREQ(plan.algorithm, "push");
  EXPECT_EQ(plan.grid.channels, cuda::kMaxChannels);
}

// Ranks may not know each other's sizes, and those decide what goes in lines.
TEST(ChooseDevice, UnevenPartsGoAlikeWhateverTheirSize) {
  for (const size_t bytes : {size_t{0}, size_t{8}, size_t{8} << 20}) {
    const DevicePlan plan = choose_device({.collective = DPT_ALL_TO_ALL,
                                           .bytes = bytes,
                                           .even = false,
                                           .layout = kLayout,
                                           .not_native = ""});
    EXPECT_STREQ(plan.algorithm, "push");
    EXPECT_EQ(plan.grid.channels, cuda::kMaxChannels);
  }
}

TEST(ChooseDevice, WhatHasNoLargeKernelIsDelegatedBeyondLines) {
  ChooseDeviceRequest request{.collective = DPT_ALL_REDUCE,
                              .bytes = 1024,
                              .large = false,
                              .layout = kLayout,
                              .not_native = ""};
  EXPECT_STREQ(choose_device(request).algorithm, "low_latency");
  request.bytes = 1 << 20;
  const DevicePlan plan = choose_device(request);
  EXPECT_STREQ(plan.algorithm, "delegate");
  EXPECT_NE(plan.reason.find("small messages only"), std::string::npos);
}

TEST(ChooseDevice, LinesAndPacketsAlwaysFit) {
  for (uint32_t slot = 64 << 10; slot >= 4 << 10; slot /= 2) {
    const Layout layout = Layout::of(8, slot);
    for (size_t bytes = 1; bytes < 100'000'000; bytes = bytes * 9 / 8 + 1) {
      const DevicePlan plan = choose_device(
          {.collective = DPT_ALL_REDUCE, .bytes = bytes, .layout = layout, .not_native = ""});
      const std::string algorithm = plan.algorithm;
      if (algorithm == "low_latency") {
        EXPECT_LE(bytes, most_in_lines(layout, plan.grid));
      } else if (algorithm == "packet") {
        EXPECT_LE(bytes / 8, most_in_packets(layout, plan.grid));
      } else {
        EXPECT_LE(plan.chunk_bytes, slot);
      }
    }
  }
}

}  // namespace
}  // namespace dpt
