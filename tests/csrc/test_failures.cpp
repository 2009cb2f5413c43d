// Groups whose ranks disagree, don't come, leave, or are told to stop.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "rank_threads.hpp"

namespace dpt::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Request all_reduce(std::vector<float>& values, dpt_reduce_op op = DPT_SUM) {
  Request request(DPT_ALL_REDUCE, DPT_FLOAT32, values.size());
  request.reduce_op(op).input(values.data()).output(values.data());
  return request;
}

struct Disagreement {
  const char* name;
  std::function<Request(std::vector<float>&)> rank_0;
  std::function<Request(std::vector<float>&)> rank_1;
  const char* words_0;
  const char* words_1;
};

Request of_type(std::vector<float>& values, dpt_data_type dtype) {
  Request request = all_reduce(values);
  request.request.dtype = dtype;
  request.request.count = 2;
  return request;
}

Request broadcast(std::vector<float>& values, int root) {
  Request request(DPT_BROADCAST, DPT_FLOAT32, values.size());
  request.root(root).input(values.data()).output(values.data());
  return request;
}

Request all_reduce_of(std::vector<float>& values, size_t count) {
  values.resize(count);
  return all_reduce(values);
}

class Mismatch : public ::testing::TestWithParam<Disagreement> {};

TEST_P(Mismatch, IsAnErrorOnEveryRankThatNamesBothSidesAndLeavesTheGroupUsable) {
  const Disagreement& disagreement = GetParam();
  run_ranks(2, [&](Rank& rank) {
    for (int round = 0; round < 2; ++round) {
      std::vector<float> values(4, 1.0F);
      const Failure failure = failure_of([&] {
        rank.run(rank.rank() == 0 ? disagreement.rank_0(values) : disagreement.rank_1(values));
      });
      EXPECT_EQ(failure.status, DPT_ERR_MISMATCH);
      EXPECT_THAT(failure.what(),
                  AllOf(HasSubstr("rank 0"),
                        HasSubstr("rank 1"),
                        HasSubstr(disagreement.words_0),
                        HasSubstr(disagreement.words_1)));
      std::vector<float> good(40000, 1.0F);
      rank.run(all_reduce(good));
      EXPECT_EQ(good, std::vector<float>(40000, 2.0F));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Of,
    Mismatch,
    ::testing::Values(Disagreement{"Size",
                                   [](auto& values) { return all_reduce_of(values, 10); },
                                   [](auto& values) { return all_reduce_of(values, 11); },
                                   "10 x float32",
                                   "11 x float32"},
                      Disagreement{"SizeAcrossAlgorithms",
                                   [](auto& values) { return all_reduce_of(values, 10); },
                                   [](auto& values) { return all_reduce_of(values, 300000); },
                                   "10 x float32",
                                   "300000 x float32"},
                      Disagreement{"Dtype",
                                   [](auto& values) { return of_type(values, DPT_FLOAT32); },
                                   [](auto& values) { return of_type(values, DPT_FLOAT64); },
                                   "2 x float32",
                                   "2 x float64"},
                      Disagreement{"ReduceOp",
                                   [](auto& values) { return all_reduce(values, DPT_SUM); },
                                   [](auto& values) { return all_reduce(values, DPT_MAX); },
                                   "sum",
                                   "max"},
                      Disagreement{"Collective",
                                   [](auto& values) { return all_reduce(values); },
                                   [](auto& values) { return broadcast(values, 0); },
                                   "all_reduce",
                                   "broadcast"},
                      Disagreement{"CollectiveAndBarrier",
                                   [](auto&) { return Request(DPT_BARRIER, DPT_UINT8, 0); },
                                   [](auto& values) { return all_reduce_of(values, 100000); },
                                   "barrier",
                                   "all_reduce"},
                      Disagreement{"Root",
                                   [](auto& values) { return broadcast(values, 0); },
                                   [](auto& values) { return broadcast(values, 1); },
                                   "root 0",
                                   "root 1"}),
    [](const auto& info) { return info.param.name; });

TEST(Timeout, NamesTheMissingRankAndSticks) {
  std::promise<void> timed_out;
  std::shared_future<void> after_timeout = timed_out.get_future().share();
  run_ranks(3,
            [&](Rank& rank) {
              rank.barrier();
              std::vector<float> values(100, 1.0F);
              if (rank.rank() != 1) {
                const Failure failure =
                    failure_of([&] { rank.run(all_reduce(values).timeout_ms(300)); });
                EXPECT_THAT(failure.what(), AllOf(HasSubstr("all_reduce"), HasSubstr("7")));
                if (failure.status == DPT_ERR_TIMEOUT && rank.rank() == 0) {
                  EXPECT_THAT(failure.what(), HasSubstr("rank 5"));
                }
              }
              rank.rank() == 0 ? timed_out.set_value() : after_timeout.wait();
              // On the rank that came too late as on the others: the group is out of step.
              const Failure later = failure_of([&] { rank.run(all_reduce(values)); });
              EXPECT_NE(later.status, DPT_ERR_TIMEOUT);
              const Failure again = failure_of([&] { rank.barrier(); });
              EXPECT_EQ(again.status, DPT_ERR_ABORTED);
              EXPECT_THAT(again.what(), AllOf(HasSubstr("barrier"), HasSubstr("failed earlier")));
            },
            {.global_ranks = {5, 7, 9}});
}

TEST(Timeout, OfTheFirstOperationNamesWhoDidNotJoin) {
  HashStore store;
  run_threads(2, [&](int index) {
    Rank rank(store, index, 3, {.group = "late", .global_ranks = {10, 11, 12}});
    const Failure failure = failure_of([&] { rank.barrier(300); });
    EXPECT_EQ(failure.status, DPT_ERR_TIMEOUT);
    EXPECT_THAT(failure.what(),
                AllOf(HasSubstr("barrier"), HasSubstr("late"), HasSubstr("rank(s) 12 ")));
  });
}

TEST(Timeout, OfAnAsynchronousOperation) {
  std::promise<void> over;
  run_ranks(2, [&](Rank& rank) {
    rank.barrier();
    std::vector<float> values(100, 1.0F);
    if (rank.rank() == 0) {
      Pending pending = rank.start(std::move(all_reduce(values).timeout_ms(200)));
      const Failure failure = failure_of([&] { pending.get(); });
      EXPECT_EQ(failure.status, DPT_ERR_TIMEOUT);
      EXPECT_THAT(failure.what(), HasSubstr("rank 0"));
      over.set_value();
    } else {
      over.get_future().wait();
    }
  });
}

TEST(Abort, EndsTheFirstOperationsWaitForTheOtherRanks) {
  // Rank 1 never comes and nobody knows why: only the abort can end this before the timeout.
  HashStore store;
  Rank rank(store, 0, 2, {.group = "lonely"});
  std::vector<float> values(10, 1.0F);
  Pending pending = rank.start(std::move(all_reduce(values).timeout_ms(600000)));
  rank.abort("the user has had enough");
  const Failure failure = failure_of([&] { pending.get(); });
  EXPECT_EQ(failure.status, DPT_ERR_ABORTED);
  EXPECT_THAT(failure.what(), HasSubstr("the user has had enough"));
}

TEST(Abort, EndsWaitsOnEveryRankAndSticks) {
  std::promise<void> entered;
  run_ranks(2, [&](Rank& rank) {
    rank.barrier();
    if (rank.rank() == 0) {
      entered.get_future().wait();
      rank.abort("the user has had enough");
    } else {
      std::vector<float> values(1000, 1.0F);
      Pending pending = rank.start(all_reduce(values));
      entered.set_value();
      const Failure failure = failure_of([&] { pending.get(); });
      EXPECT_EQ(failure.status, DPT_ERR_ABORTED);
      EXPECT_THAT(failure.what(), HasSubstr("the user has had enough"));
    }
    for (int round = 0; round < 2; ++round) {
      const Failure later = failure_of([&] { rank.barrier(); });
      EXPECT_EQ(later.status, DPT_ERR_ABORTED);
      EXPECT_THAT(later.what(), HasSubstr("the user has had enough"));
    }
  });
}

TEST(Leave, IsToldToThoseWhoStillWait) {
  run_ranks(3,
            [](Rank& rank) {
              rank.barrier();
              if (rank.rank() == 2) return;  // destroyed
              std::vector<float> values(100000, 1.0F);
              const Failure failure = failure_of([&] { rank.run(all_reduce(values)); });
              EXPECT_TRUE(failure.status == DPT_ERR_PEER_LOST || failure.status == DPT_ERR_ABORTED)
                  << failure.what();
              EXPECT_THAT(failure.what(), HasSubstr("rank 22"));
            },
            {.global_ranks = {20, 21, 22}});
}

TEST(Leave, AfterTheLastOperationHarmsNobody) {
  for (int round = 0; round < 20; ++round) {
    run_ranks(4, [](Rank& rank) {
      std::vector<float> values(20000, 1.0F);
      rank.run(all_reduce(values));
      EXPECT_EQ(values, std::vector<float>(20000, 4.0F));
    });
  }
}

TEST(Interrupt, EndsTheWaitAndTheGroup) {
  std::atomic<bool> pressed = false;
  HashStore store;
  std::promise<void> over;
  std::shared_future<void> is_over = over.get_future().share();
  run_threads(2, [&](int index) {
    RankOptions options{.group = "interrupted"};
    if (index == 0) options.interrupted = [&] { return pressed.load(); };
    Rank rank(store, index, 2, options);
    rank.barrier();
    if (index == 0) {
      std::thread finger([&] { pressed = true; });
      const Failure failure = failure_of([&] { rank.barrier(); });
      finger.join();
      EXPECT_EQ(failure.status, DPT_ERR_INTERRUPTED);
      pressed = false;
      over.set_value();
    }
    is_over.wait();
    EXPECT_THAT(failure_of([&] { rank.barrier(); }).what(), HasSubstr("interrupted"));
  });
}

TEST(Interrupt, EndsTheWaitForRanksThatDoNotJoin) {
  HashStore store;
  Rank rank(store, 0, 2, {.group = "alone", .interrupted = [] { return true; }});
  EXPECT_EQ(failure_of([&] { rank.barrier(); }).status, DPT_ERR_INTERRUPTED);
}

TEST(Create, RefusesARankOutsideOfTheGroup) {
  HashStore store;
  const Failure failure = failure_of([&] { Rank(store, 3, 3, {.group = "small"}); });
  EXPECT_EQ(failure.status, DPT_ERR_INVALID);
  EXPECT_THAT(failure.what(), AllOf(HasSubstr("small"), HasSubstr("rank 3")));
}

TEST(Messages, FitTheirBufferHoweverLongTheGroupsName) {
  run_ranks(2,
            [](Rank& rank) {
              std::vector<float> values(10 + rank.rank(), 1.0F);
              const Failure failure = failure_of([&] { rank.run(all_reduce(values)); });
              EXPECT_LT(std::string(failure.what()).size(), sizeof(dpt_error::message));
            },
            {.group = std::string(4000, 'g')});
}

}  // namespace
}  // namespace dpt::testing
