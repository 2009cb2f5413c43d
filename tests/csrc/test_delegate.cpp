// Calls that native code can't serve go to the delegate, and are counted with the reason.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/statistics.hpp"
#include "rank_threads.hpp"

namespace dpt::testing {
namespace {

using ::testing::HasSubstr;

std::string reason_counted(const std::string& group) {
  for (const StatisticsRow& row : all_statistics()) {
    if (row.group == group && row.algorithm == AlgorithmName::kDelegate) return row.reason;
  }
  return "nothing was delegated";
}

TEST(Delegate, ServesEverythingWhenNativeIsOff) {
  run_ranks(2,
            [](Rank& rank) {
              std::vector<float> values(10, 1.0F);
              EXPECT_EQ(rank.run(sum_in_place(values)), DPT_DELEGATED);
              EXPECT_EQ(rank.run(Request(DPT_BARRIER, DPT_UINT8, 0)), DPT_DELEGATED);
              EXPECT_EQ(rank.delegate().calls,
                        (std::vector<dpt_collective>{DPT_ALL_REDUCE, DPT_BARRIER}));
            },
            {.group = "stock", .native = false});
  EXPECT_THAT(reason_counted("stock"), HasSubstr("collectives=stock"));
}

TEST(Delegate, ServesWhatTheAdapterKeepsFromNativeCode) {
  run_ranks(2,
            [](Rank& rank) {
              std::vector<float> values(10, 1.0F);
              EXPECT_EQ(rank.run(sum_in_place(values).not_native("tensors on cuda")),
                        DPT_DELEGATED);
              EXPECT_EQ(rank.run(sum_in_place(values)), DPT_COMPLETED);
            },
            {.group = "cuda"});
  EXPECT_THAT(reason_counted("cuda"), HasSubstr("tensors on cuda"));
}

TEST(Delegate, ServesReductionsThatNativeCodeDoesNotHave) {
  run_ranks(2,
            [](Rank& rank) {
              Request request(DPT_ALL_REDUCE, DPT_COMPLEX64, 4);
              float values[8] = {};
              request.reduce_op(DPT_PRODUCT).input(values).output(values);
              EXPECT_EQ(rank.run(request), DPT_DELEGATED);
            },
            {.group = "complex"});
  EXPECT_THAT(reason_counted("complex"), HasSubstr("no native product of complex64"));
}

TEST(Delegate, KeepsItsOwnFailure) {
  run_ranks(2, [](Rank& rank) {
    rank.delegate().status = DPT_ERR_DELEGATE;
    const Failure failure = failure_of(
        [&] { rank.run(Request(DPT_SEND, DPT_FLOAT32, 1).not_native("tensors on cuda")); });
    EXPECT_EQ(failure.status, DPT_ERR_DELEGATE);
    EXPECT_THAT(failure.what(), HasSubstr("the delegate's own words"));
    // The group itself is none the worse for it.
    rank.barrier();
  });
}

TEST(Delegate, MismatchWithANativeRankIsFoundOutBeforehand) {
  run_ranks(2, [](Rank& rank) {
    rank.barrier();
    double values[4] = {};
    Request request(DPT_ALL_REDUCE, rank.rank() == 0 ? DPT_COMPLEX64 : DPT_FLOAT32, 2);
    request.reduce_op(DPT_PRODUCT).input(values).output(values);
    const Failure failure = failure_of([&] { rank.run(request); });
    EXPECT_EQ(failure.status, DPT_ERR_MISMATCH);
    EXPECT_THAT(failure.what(), HasSubstr("complex64"));
    EXPECT_THAT(failure.what(), HasSubstr("float32"));
    EXPECT_TRUE(rank.delegate().calls.empty());
    rank.barrier();
  });
}

}  // namespace
}  // namespace dpt::testing
