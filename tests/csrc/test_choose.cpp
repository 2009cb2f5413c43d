// The choice of a plan is a pure function of facts that all ranks share.
#include <gtest/gtest.h>

#include <cstring>

#include "algorithms/algorithm.hpp"
#include "tuner/choose.hpp"

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
        EXPECT_NE(find_algorithm(plan.algorithm, collective), nullptr) << plan.algorithm;
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
  EXPECT_STREQ(first.algorithm, second.algorithm);
  EXPECT_EQ(first.chunk_bytes, second.chunk_bytes);
}

TEST(Choose, DelegatesWithTheReasonGiven) {
  const Plan plan = choose(
      {.collective = DPT_ALL_REDUCE, .bytes = 8, .size = 2, .not_native = "tensors on cuda"});
  EXPECT_STREQ(plan.algorithm, "delegate");
  EXPECT_EQ(plan.reason, "tensors on cuda");
  for (const Collective collective : {DPT_SEND, DPT_RECV}) {
    EXPECT_FALSE(is_native_collective(collective));
  }
}

TEST(Choose, KeepsOneRankAtHome) {
  for (const Collective collective : kNative) {
    EXPECT_STREQ(choose({.collective = collective, .bytes = 8, .size = 1}).algorithm, "local");
  }
}

}  // namespace
}  // namespace dpt::testing
