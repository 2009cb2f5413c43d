// The choice of a plan is a pure function of facts that all ranks share.
#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "algorithms/algorithm.hpp"
#include "tuner/choose.hpp"
#include "units.hpp"

namespace dpt::testing {
namespace {

const std::vector<Collective> kNative = {DPT_ALL_REDUCE,
                                         DPT_ALL_GATHER,
                                         DPT_REDUCE_SCATTER,
                                         DPT_BROADCAST,
                                         DPT_BARRIER,
                                         DPT_REDUCE,
                                         DPT_GATHER,
                                         DPT_SCATTER,
                                         DPT_ALL_TO_ALL};

TEST(Choose, NamesAnAlgorithmThatExists) {
  for (const Collective collective : kNative) {
    EXPECT_TRUE(is_native_collective(collective));
    for (size_t bytes = 0; bytes < size_t{1} << 33; bytes = bytes * 3 + 1) {
      for (const int size : {2, 3, 8, 64}) {
        const Plan plan = choose({.collective = collective,
                                  .bytes = bytes,
                                  .size = size,
                                  .max_chunk_bytes = Segment::kMaxChunkBytes});
        EXPECT_NE(find_algorithm(plan.algorithm, collective), nullptr) << name_of(plan.algorithm);
        EXPECT_LE(plan.chunk_bytes, Segment::kMaxChunkBytes);
        EXPECT_FALSE(plan.reason.empty());
      }
    }
  }
}

TEST(Choose, GivesTheSameAnswerTwice) {
  const ChooseRequest request{.collective = DPT_ALL_REDUCE, .bytes = 12345, .size = 4};
  const Plan first = choose(request);
  choose({.collective = DPT_BROADCAST, .bytes = 1, .size = 2});
  const Plan second = choose(request);
  EXPECT_EQ(first.algorithm, second.algorithm);
  EXPECT_EQ(first.chunk_bytes, second.chunk_bytes);
}

TEST(Choose, DelegatesWithTheReasonGiven) {
  const Plan plan = choose(
      {.collective = DPT_ALL_REDUCE, .bytes = 8, .size = 2, .not_native = "tensors on cuda"});
  EXPECT_EQ(plan.algorithm, AlgorithmName::kDelegate);
  EXPECT_EQ(plan.reason, "tensors on cuda");
  for (const Collective collective : {DPT_SEND, DPT_RECV}) {
    EXPECT_FALSE(is_native_collective(collective));
  }
}

TEST(Choose, CutsLongMessagesIntoLongerChunks) {
  const auto chunk = [](size_t bytes, bool oversubscribed, size_t most) {
    return choose({.collective = DPT_ALL_REDUCE,
                   .bytes = bytes,
                   .size = 4,
                   .max_chunk_bytes = most,
                   .oversubscribed = oversubscribed})
        .chunk_bytes;
  };
  EXPECT_EQ(chunk(64 * kKiB, false, 1024 * kKiB), 64 * kKiB);
  EXPECT_EQ(chunk(4096 * kKiB, false, 1024 * kKiB), 128 * kKiB);
  EXPECT_EQ(chunk(4096 * kKiB, true, 1024 * kKiB), 256 * kKiB);
  EXPECT_EQ(chunk(4096 * kKiB, true, 64 * kKiB), 64 * kKiB);
}

TEST(Choose, FollowsTheTunerButNotForSmallMessages) {
  const Decision tuned{.chosen = Candidate{AlgorithmName::kPipelined, 4096},
                       .reason = "for the test"};
  ChooseRequest request{.collective = DPT_ALL_REDUCE, .bytes = 1 << 20, .size = 2, .tuned = &tuned};
  EXPECT_EQ(choose(request).chunk_bytes, 4096);
  EXPECT_EQ(choose(request).reason, "for the test");
  request.bytes = kLatencyBytes;
  EXPECT_EQ(choose(request).algorithm, AlgorithmName::kOneShot);
  request.bytes = 64 << 10;
  EXPECT_EQ(choose(request).algorithm, AlgorithmName::kPipelined);
  request.oversubscribed = true;
  EXPECT_EQ(choose(request).algorithm, AlgorithmName::kOneShot);
  request.bytes = 1 << 20;
  request.not_native = "tensors on cuda";
  EXPECT_EQ(choose(request).algorithm, AlgorithmName::kDelegate);
}

TEST(Choose, ADecisionWithoutTimesIsTheRuleOfThumb) {
  const Decision open;
  ChooseRequest request{.collective = DPT_BROADCAST, .bytes = 1 << 20, .size = 2};
  const Plan rule = choose(request);
  request.tuned = &open;
  EXPECT_EQ(choose(request).algorithm, rule.algorithm);
  EXPECT_EQ(choose(request).chunk_bytes, rule.chunk_bytes);
}

TEST(Candidates, AreFewAndBeginWithTheRuleOfThumb) {
  for (const Collective collective : kNative) {
    if (collective == DPT_BARRIER || collective == DPT_ALL_TO_ALL) continue;
    for (size_t bytes = kLatencyBytes + 1; bytes < size_t{1} << 30; bytes *= 2) {
      for (const size_t most : {size_t{4096}, size_t{256} << 10, size_t{1} << 20}) {
        const ChooseRequest request{.collective = collective,
                                    .bytes = bytes,
                                    .size = 4,
                                    .max_chunk_bytes = most,
                                    .oversubscribed = bytes % 3 == 0};
        const std::vector<Candidate> found = candidates(request);
        ASSERT_FALSE(found.empty());
        EXPECT_LE(found.size(), 5);
        EXPECT_EQ(found[0].chunk_bytes, choose(request).chunk_bytes);
        std::set<size_t> chunks;
        for (const Candidate& candidate : found) {
          EXPECT_NE(find_algorithm(candidate.algorithm, collective), nullptr);
          EXPECT_LE(candidate.chunk_bytes, most);
          EXPECT_FALSE(is_delegate(candidate));
          EXPECT_TRUE(chunks.insert(candidate.chunk_bytes).second) << candidate.chunk_bytes;
        }
      }
    }
  }
}

TEST(Choose, KeepsOneRankAtHome) {
  for (const Collective collective : kNative) {
    EXPECT_EQ(choose({.collective = collective, .bytes = 8, .size = 1}).algorithm,
              AlgorithmName::kLocal);
  }
}

}  // namespace
}  // namespace dpt::testing
