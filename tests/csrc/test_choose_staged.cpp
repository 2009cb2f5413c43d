// Plans for GPUs that are staged through the host's memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "tuner/choose_staged.hpp"
#include "tuner/table.hpp"
#include "units.hpp"

namespace dpt {
namespace {

using ::testing::HasSubstr;

constexpr cuda::Staging kStaging{.ranks = 4, .slot_bytes = 2 * kMiB, .depth = 3, .threads = 8};

ChooseDeviceRequest request_for(Collective collective, size_t bytes) {
  return {.collective = collective,
          .bytes = bytes,
          .layout = {},
          .not_native = "",
          .staging = kStaging};
}

TEST(ChooseStaged, TheDelegateKeepsWhatWasNotMeasured) {
  ChooseDeviceRequest request = request_for(DPT_ALL_REDUCE, 64 * kMiB);
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kCpuReduce);
  request.delegate = true;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
}

TEST(ChooseStaged, WhatWasMeasuredFastestServes) {
  ChooseDeviceRequest request = request_for(DPT_REDUCE_SCATTER, 64 * kMiB);
  request.delegate = true;
  const Measurement ours{{AlgorithmName::kCpuReduce, 2 * kMiB, 3, 4}, 10, 9.9, 10.1};
  const Measurement stock{{AlgorithmName::kDelegate}, 20, 19.9, 20.1};
  const Decision decision = decide({ours, stock}, {kMiB * 1024, true, true}, "measured");
  request.tuned = &decision;
  const DevicePlan plan = choose_device(request);
  EXPECT_EQ(plan.algorithm, AlgorithmName::kCpuReduce);
  EXPECT_EQ(plan.chunk_bytes, 2 * kMiB);
  EXPECT_EQ(plan.grid.threads, 4);
  EXPECT_EQ(plan.grid.channels, 3);
  EXPECT_THAT(plan.reason, HasSubstr("3 slots of 2 MiB, 4 workers for each rank"));

  request.staging.slot_bytes = kMiB;  // a later group has less
  EXPECT_EQ(choose_device(request).chunk_bytes, kMiB);
  request.staging.threads = 2;  // or other ranks
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
}

// Devices add up if that is no byte more to copy, and the reduction has a kernel.
TEST(ChooseStaged, DevicesAddUpWhatIsTheirOwn) {
  ChooseDeviceRequest request = request_for(DPT_REDUCE_SCATTER, 64 * kMiB);
  request.devices_add = true;
  EXPECT_EQ(choose_device(request).grid.threads, 0);
  EXPECT_THAT(describe_staged(device_candidates(request)[0]), HasSubstr("added up by the GPUs"));
  request.devices_add = false;
  EXPECT_EQ(choose_device(request).grid.threads, 8);
  const Decision decision{Candidate{AlgorithmName::kCpuReduce, kMiB, 3, 0}, "measured", "", {}};
  request.tuned = &decision;  // with another type
  request.delegate = true;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);

  request = request_for(DPT_ALL_REDUCE, 64 * kMiB);
  EXPECT_EQ(choose_device(request).grid.threads, 8);
  request.devices_add = true;
  EXPECT_EQ(choose_device(request).grid.threads, 0);
  const std::vector<Candidate> found = device_candidates(request);
  EXPECT_EQ(std::count_if(found.begin(), found.end(), [](auto& each) { return each.threads == 8; }),
            1);
}

TEST(ChooseStaged, ThePartOfTheDelegate) {
  ChooseDeviceRequest request = request_for(DPT_ALL_REDUCE, 16 * kMiB);
  const auto parts = [&] {
    std::vector<int> found;
    for (const Candidate& each : device_candidates(request)) {
      if (each.delegated != 0) found.push_back(each.delegated);
    }
    return found;
  };
  request.divisible = true;
  EXPECT_EQ(parts(), std::vector<int>{});  // there is none
  request.delegate = true;
  EXPECT_EQ(parts(), (std::vector{25, 40, 50}));
  EXPECT_LE(device_candidates(request).size(), kMostDeviceCandidates);
  request.bytes = kMiB;
  EXPECT_EQ(parts(), std::vector<int>{});
  request.bytes = 16 * kMiB;
  request.staging.nodes = 2;
  EXPECT_EQ(parts(), std::vector<int>{});
  request.staging.nodes = 1;

  const Measurement whole{{AlgorithmName::kCpuReduce, kMiB, 3, 8}, 20, 19.9, 20.1};
  const Measurement divided{{AlgorithmName::kCpuReduce, kMiB, 3, 8, 40}, 10, 9.9, 10.1};
  const Measurement stock{{AlgorithmName::kDelegate}, 30, 29.9, 30.1};
  Decision decision = decide({whole, divided, stock}, {kMiB * 1024, true, true}, "measured");
  EXPECT_THAT(decision.reason, HasSubstr("8 workers for each rank, NCCL beside it with 40%"));
  request.tuned = &decision;
  EXPECT_EQ(choose_device(request).delegated, 40);
  request.divisible = false;  // of another type
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kCpuReduce);
  EXPECT_EQ(choose_device(request).delegated, 0);
  decision.times.erase(decision.times.begin());
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
  // A delegate that doesn't compete gets no part either.
  decision = decide({divided, whole}, {kMiB * 1024, false, true}, "measured");
  EXPECT_EQ(decision.chosen->delegated, 0);
}

TEST(ChooseStaged, FewCandidatesThatAllServe) {
  for (const Collective collective :
       {DPT_ALL_REDUCE, DPT_REDUCE_SCATTER, DPT_ALL_GATHER, DPT_BROADCAST}) {
    for (const size_t bytes : {1UL, 64UL << 10, kMiB, 16 * kMiB, 256 * kMiB}) {
      ChooseDeviceRequest request = request_for(collective, bytes);
      const std::vector<Candidate> found = device_candidates(request);
      ASSERT_FALSE(found.empty());
      EXPECT_LE(found.size(), 5);
      const DevicePlan rule = choose_device(request);
      EXPECT_EQ(found[0].chunk_bytes, rule.chunk_bytes);
      EXPECT_EQ(found[0].threads, rule.grid.threads);
      request.delegate = true;
      for (const Candidate& each : found) {
        EXPECT_EQ(known_algorithm(name_of(each.algorithm), true), each.algorithm);
        EXPECT_LE(each.chunk_bytes, kStaging.slot_bytes);
        const Decision decision{each, "fastest", "", {}};
        request.tuned = &decision;
        EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kCpuReduce);
      }
    }
  }
}

TEST(ChooseStaged, LongMessagesGoByShorterOnes) {
  for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
    const bool is_long = range_of(bucket).nominal > 64 * kMiB;
    EXPECT_EQ(range_of(tried_for(bucket)).nominal, is_long ? 64 * kMiB : range_of(bucket).nominal);
  }
  EXPECT_GT(range_of(kNumBuckets - 1).nominal, 64 * kMiB);
}

TEST(ChooseStaged, WorkersLeaveTheProgramHalfOfItsCoresOrFour) {
  const std::map<int, int> workers{
      {0, 1}, {1, 1}, {2, 1}, {4, 2}, {8, 4}, {10, 6}, {16, 12}, {64, 12}};
  for (const auto& [cores, expected] : workers) EXPECT_EQ(usual_workers(cores), expected) << cores;
}

}  // namespace
}  // namespace dpt
