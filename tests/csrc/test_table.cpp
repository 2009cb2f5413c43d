// The tuner's table: which sizes share a measurement, and which candidate wins.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tuner/choose.hpp"
#include "tuner/table.hpp"

namespace dpt::testing {
namespace {

using ::testing::HasSubstr;

constexpr TuningClass kOwnCores{2, false};
constexpr Limits kAnything{1 << 20, true};

Measurement time_of(AlgorithmName algorithm, size_t chunk, double low, double median, double high) {
  return {{algorithm, chunk}, median, low, high};
}

TEST(Bucket, RangesJoinWithoutGaps) {
  for (int bucket = 0; bucket + 1 < kNumBuckets; ++bucket) {
    EXPECT_EQ(range_of(bucket).last + 1, range_of(bucket + 1).first);
  }
  EXPECT_EQ(range_of(0).first, kLatencyBytes + 1);
  EXPECT_EQ(range_of(kNumBuckets - 1).last, std::numeric_limits<size_t>::max());
}

TEST(Bucket, HoldsTheSizesOfItsRange) {
  // One buffer and few ranks: up to 16 MiB every bucket is tried.
  for (int bucket = 0; bucket <= 4; ++bucket) {
    const SizeRange range = range_of(bucket);
    for (const size_t bytes : {range.first, range.nominal}) {
      EXPECT_EQ(bucket_of(DPT_ALL_REDUCE, bytes, kOwnCores), bucket) << bytes;
    }
  }
  EXPECT_EQ(bucket_of(DPT_ALL_REDUCE, range_of(2).last, kOwnCores), 2);
}

TEST(Bucket, NothingIsMeasuredWhereLatencyDecidesOrSizesDiffer) {
  EXPECT_EQ(bucket_of(DPT_ALL_REDUCE, kLatencyBytes, kOwnCores), std::nullopt);
  const TuningClass shared_cores{4, true};
  EXPECT_EQ(bucket_of(DPT_ALL_REDUCE, 64 << 10, shared_cores), std::nullopt);  // one shot
  EXPECT_EQ(bucket_of(DPT_ALL_REDUCE, (64 << 10) + 1, shared_cores), 0);
  EXPECT_EQ(bucket_of(DPT_BROADCAST, 64 << 10, shared_cores), 0);
  EXPECT_EQ(bucket_of(DPT_BARRIER, 1 << 20, kOwnCores), std::nullopt);
  EXPECT_EQ(bucket_of(DPT_SEND, 1 << 20, kOwnCores), std::nullopt);
  EXPECT_EQ(bucket_of(DPT_ALL_TO_ALL, 1 << 20, kOwnCores), std::nullopt);
}

TEST(Bucket, LimitsTheMemoryOfATrial) {
  const size_t huge = size_t{1} << 32;
  for (int index = 0; index < kNumCollectives; ++index) {
    const auto collective = static_cast<Collective>(index);
    if (collective == DPT_BARRIER || collective == DPT_ALL_TO_ALL) continue;
    for (const TuningClass group : {kOwnCores, TuningClass{8, true}, TuningClass{128, false}}) {
      const auto bucket = bucket_of(collective, huge, group);
      ASSERT_TRUE(bucket);
      EXPECT_LE(range_of(*bucket).nominal * num_buffers(collective, group.ranks), 32 << 20);
      // Anything larger shares the largest measurement.
      EXPECT_EQ(bucket_of(collective, huge * 2, group), bucket);
    }
  }
}

TEST(Bucket, OfTheDeviceGoesOneFurther) {
  const TuningClass device{4, false, 1, "a GPU"};
  EXPECT_EQ(bucket_of(DPT_ALL_REDUCE, 16 << 10, device), std::nullopt);
  EXPECT_EQ(bucket_of(DPT_ALL_REDUCE, (16 << 10) + 1, device), 0);
  EXPECT_EQ(bucket_of(DPT_ALL_GATHER, 64 << 20, device), 5);
  EXPECT_EQ(bucket_of(DPT_ALL_GATHER, 256 << 20, device), 6);
  EXPECT_EQ(bucket_of(DPT_ALL_GATHER, size_t{1} << 40, device), 6);
  EXPECT_EQ(bucket_of(DPT_ALL_TO_ALL, 1 << 20, device), 2);
  EXPECT_EQ(range_of(6).nominal, 256 << 20);
  EXPECT_NE(device, (TuningClass{4, false, 1, "another GPU"}));
  EXPECT_NE(device, (TuningClass{4, false}));
}

TEST(Summary, IsTheMedianAndItsQuartiles) {
  const Measurement odd = summarize({AlgorithmName::kPipelined, 64}, {5, 1, 3});
  EXPECT_DOUBLE_EQ(odd.median_us, 3);
  EXPECT_DOUBLE_EQ(odd.low_us, 2);
  EXPECT_DOUBLE_EQ(odd.high_us, 4);
  const Measurement one = summarize({AlgorithmName::kPipelined, 64}, {7});
  EXPECT_DOUBLE_EQ(one.low_us, 7);
  EXPECT_DOUBLE_EQ(one.high_us, 7);
}

TEST(Winner, IsTheFastestNative) {
  const Entry entry = {time_of(AlgorithmName::kPipelined, 65536, 90, 100, 110),
                       time_of(AlgorithmName::kPipelined, 131072, 45, 50, 55),
                       time_of(AlgorithmName::kDelegate, 0, 190, 200, 210)};
  ASSERT_NE(winner(entry, kAnything), nullptr);
  EXPECT_EQ(winner(entry, kAnything)->candidate.chunk_bytes, 131072);
}

TEST(Winner, OfEqualsIsTheFirst) {
  const Entry equal = {time_of(AlgorithmName::kPipelined, 65536, 101, 102, 103),
                       time_of(AlgorithmName::kPipelined, 131072, 99, 100, 100.5)};
  EXPECT_EQ(winner(equal, kAnything)->candidate.chunk_bytes, 65536);
  const Entry noisy = {time_of(AlgorithmName::kPipelined, 65536, 90, 130, 180),
                       time_of(AlgorithmName::kPipelined, 131072, 80, 100, 110)};
  EXPECT_EQ(winner(noisy, kAnything)->candidate.chunk_bytes, 65536);
}

TEST(Winner, FitsTheGroupsChunks) {
  const Entry entry = {time_of(AlgorithmName::kPipelined, 65536, 90, 100, 110),
                       time_of(AlgorithmName::kPipelined, 131072, 45, 50, 55)};
  EXPECT_EQ(winner(entry, {65536, true})->candidate.chunk_bytes, 65536);
  EXPECT_EQ(winner(entry, {512, true}), nullptr);
  EXPECT_EQ(winner({}, kAnything), nullptr);
}

TEST(Winner, IsTheDelegateOnlyBeyondTheNoise) {
  const auto wins = [](double low, double median, double high) {
    const Entry entry = {time_of(AlgorithmName::kPipelined, 65536, 90, 100, 110),
                         time_of(AlgorithmName::kDelegate, 0, low, median, high)};
    return is_delegate(winner(entry, kAnything)->candidate);
  };
  EXPECT_TRUE(wins(70, 80, 85));
  EXPECT_FALSE(wins(91, 95, 96));  // less than 10% faster
  EXPECT_FALSE(wins(50, 80, 95));  // the spreads overlap
}

TEST(Winner, IsNeverTheDelegateWhereItMayNotCompete) {
  const Entry entry = {time_of(AlgorithmName::kPipelined, 65536, 90, 100, 110),
                       time_of(AlgorithmName::kDelegate, 0, 9, 10, 11)};
  EXPECT_FALSE(is_delegate(winner(entry, {1 << 20, false})->candidate));
}

Measurement grid_of(int channels, double low, double median, double high) {
  return {{AlgorithmName::kTwoShot, 0, channels, 512}, median, low, high};
}

TEST(Winner, OnTheDeviceIsNativeOnlyWhereItIsClearlyFaster) {
  constexpr Limits kDevice{1 << 20, true, true};
  const auto native_wins = [&](double low, double median, double high) {
    const Entry entry = {grid_of(32, low, median, high),
                         time_of(AlgorithmName::kDelegate, 0, 99, 100, 101)};
    return !is_delegate(winner(entry, kDevice)->candidate);
  };
  EXPECT_TRUE(native_wins(95, 97, 98));
  EXPECT_FALSE(native_wins(97, 98, 98.5));  // by less than 3%
  EXPECT_FALSE(native_wins(80, 95, 99));    // the spreads touch
  EXPECT_FALSE(native_wins(100, 105, 110));
  // The first of equals, unless only the fastest is fast enough.
  const auto channels = [&](const Entry& entry) {
    return winner(entry, kDevice)->candidate.channels;
  };
  EXPECT_EQ(channels({grid_of(32, 88, 90, 92),
                      grid_of(16, 87, 89, 90),
                      time_of(AlgorithmName::kDelegate, 0, 99, 100, 101)}),
            32);
  EXPECT_EQ(channels({grid_of(32, 96, 98, 99),
                      grid_of(16, 95.5, 96, 97),
                      time_of(AlgorithmName::kDelegate, 0, 99, 100, 101)}),
            16);
  EXPECT_EQ(winner({grid_of(32, 199, 200, 201), time_of(AlgorithmName::kDelegate, 0, 9, 10, 11)},
                   {1 << 20, false, true})
                ->candidate.channels,
            32);
}

TEST(Decide, OnTheDeviceNamesTheGrid) {
  constexpr Limits kDevice{1 << 20, true, true};
  EXPECT_EQ(decide({grid_of(16, 9, 10, 11)}, kDevice, "measured").reason,
            "fastest measured, 16 x 512 threads");
  EXPECT_EQ(decide({grid_of(16, 9, 10, 11), time_of(AlgorithmName::kDelegate, 0, 9, 10, 11)},
                   kDevice,
                   "measured")
                .reason,
            "native is not clearly faster, measured");
}

TEST(Decide, SaysWhatWonAndWhereThatIsKnownFrom) {
  Entry entry = {time_of(AlgorithmName::kPipelined, 65536, 90, 100, 110)};
  const Decision native = decide(entry, kAnything, "measured");
  EXPECT_EQ(native.chosen->algorithm, AlgorithmName::kPipelined);
  EXPECT_EQ(native.reason, "fastest measured, chunks of 64 KiB");
  entry.push_back(time_of(AlgorithmName::kDelegate, 0, 9, 10, 11));
  const Decision delegated = decide(entry, kAnything, "in the profile");
  EXPECT_EQ(delegated.chosen->algorithm, AlgorithmName::kDelegate);
  EXPECT_THAT(delegated.reason, HasSubstr("faster than native, in the profile"));
  EXPECT_FALSE(decide({}, kAnything, "measured").chosen.has_value());
}

TEST(Table, FindsTheNearestMeasurement) {
  TimingTable table;
  EXPECT_EQ(table.nearest(DPT_ALL_REDUCE, 3), std::nullopt);
  table.at(DPT_ALL_REDUCE, 0) = {time_of(AlgorithmName::kPipelined, 65536, 1, 1, 1)};
  EXPECT_EQ(table.nearest(DPT_ALL_REDUCE, 3), 0);
  table.at(DPT_ALL_REDUCE, 4) = table.at(DPT_ALL_REDUCE, 2) = table.at(DPT_ALL_REDUCE, 0);
  EXPECT_EQ(table.nearest(DPT_ALL_REDUCE, 3), 4);
  EXPECT_EQ(table.nearest(DPT_ALL_REDUCE, 2), 2);
  EXPECT_EQ(table.nearest(DPT_BROADCAST, 3), std::nullopt);
}

}  // namespace
}  // namespace dpt::testing
