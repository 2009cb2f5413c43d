// Ranks that measure together: everyone settles on the same plan, results stay exact, and the
// profile carries the times to the next run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <regex>
#include <thread>

#include "comm/decisions.hpp"
#include "comm/statistics.hpp"
#include "rank_threads.hpp"
#include "tuner/profile.hpp"

namespace dpt::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr size_t kCount = (256 << 10) / sizeof(float);  // the middle of a measured range
constexpr size_t kBytes = kCount * sizeof(float);

// A stock backend that is faster than any native code: it does nothing.
dpt_status do_nothing(const dpt_request&) { return DPT_OK; }

dpt_status take_long(const dpt_request&) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return DPT_OK;
}

class Calibration : public ::testing::Test {
 protected:
  Calibration() {
    Decisions::instance().reset();
    std::filesystem::create_directories(folder_);
  }
  ~Calibration() override {
    Decisions::instance().reset();
    std::filesystem::remove_all(folder_);
  }

  // Finds the decision of a group of `ranks` for an all_reduce of kBytes.
  static DecisionRow decision(int ranks, Collective collective = DPT_ALL_REDUCE) {
    for (const DecisionRow& row : Decisions::instance().rows()) {
      const bool holds = row.bytes.first <= kBytes && kBytes <= row.bytes.last;
      if (row.group.ranks == ranks && row.collective == collective && holds) return row;
    }
    throw std::logic_error("nothing was decided");
  }

  static size_t num_decisions() { return Decisions::instance().rows().size(); }

  std::filesystem::path folder_ = std::filesystem::temp_directory_path() /
                                  ("deepytorch-calibration-" + std::to_string(getpid()));
  std::string profile_ = folder_ / "profile.json";
};

dpt_outcome sum_ones(Rank& rank, size_t count = kCount) {
  std::vector<float> values(count, 1.0F);
  const dpt_outcome outcome = rank.run(sum_in_place(values));
  if (outcome == DPT_COMPLETED) {
    EXPECT_EQ(values, std::vector<float>(count, static_cast<float>(rank.size())));
  }
  return outcome;
}

TEST_F(Calibration, MeasuresAtTheFirstUseOfASize) {
  run_ranks(3,
            [](Rank& rank) {
              for (int i = 0; i < 4; ++i) EXPECT_EQ(sum_ones(rank), DPT_COMPLETED);
            },
            {.tune = DPT_TUNE_AUTO});
  const DecisionRow row = decision(3);
  EXPECT_EQ(num_decisions(), 1);
  EXPECT_EQ(row.decision.source, "measured now");
  EXPECT_GE(row.decision.times.size(), 2);
  EXPECT_THAT(row.decision.reason, StartsWith("fastest measured, chunks of"));
  for (const Measurement& time : row.decision.times) {
    EXPECT_LE(time.low_us, time.median_us);
    EXPECT_LE(time.median_us, time.high_us);
  }
}

TEST_F(Calibration, ServesEveryCollective) {
  run_ranks(2,
            [](Rank& rank) {
              std::vector<float> mine(kCount, static_cast<float>(rank.rank()));
              std::vector<std::vector<float>> parts(2, std::vector<float>(kCount, 7.0F));
              rank.run(Request(DPT_ALL_GATHER, DPT_FLOAT32, kCount)
                           .input(mine.data())
                           .output(parts[0].data())
                           .output(parts[1].data()));
              EXPECT_EQ(parts[0], std::vector<float>(kCount, 0.0F));
              EXPECT_EQ(parts[1], std::vector<float>(kCount, 1.0F));
              rank.run(Request(DPT_REDUCE_SCATTER, DPT_FLOAT32, kCount)
                           .reduce_op(DPT_SUM)
                           .input(parts[0].data())
                           .input(parts[1].data())
                           .output(mine.data()));
              EXPECT_EQ(mine, std::vector<float>(kCount, 2.0F * static_cast<float>(rank.rank())));
              rank.run(Request(DPT_BROADCAST, DPT_FLOAT32, kCount)
                           .root(1)
                           .input(mine.data())
                           .output(mine.data()));
              EXPECT_EQ(mine, std::vector<float>(kCount, 2.0F));
            },
            {.tune = DPT_TUNE_AUTO});
  for (const Collective collective : {DPT_ALL_GATHER, DPT_REDUCE_SCATTER, DPT_BROADCAST}) {
    EXPECT_EQ(decision(2, collective).decision.source, "measured now") << collective;
  }
}

TEST_F(Calibration, LeavesTheLatencyRegionAlone) {
  run_ranks(2,
            [](Rank& rank) {
              sum_ones(rank, 10);
              rank.barrier();
            },
            {.tune = DPT_TUNE_AUTO});
  EXPECT_EQ(num_decisions(), 0);
}

TEST_F(Calibration, IsOffUnlessAskedFor) {
  run_ranks(2, [](Rank& rank) { sum_ones(rank); });
  EXPECT_EQ(num_decisions(), 0);
}

TEST_F(Calibration, IsSharedByGroupsThatAreAlike) {
  run_ranks(2, [](Rank& rank) { sum_ones(rank); }, {.tune = DPT_TUNE_AUTO});
  run_ranks(2, [](Rank& rank) { sum_ones(rank); }, {.tune = DPT_TUNE_AUTO});
  EXPECT_EQ(decision(2).decision.source, "measured in this run");
  run_ranks(3, [](Rank& rank) { sum_ones(rank); }, {.tune = DPT_TUNE_AUTO});
  EXPECT_EQ(decision(3).decision.source, "measured now");
}

TEST_F(Calibration, ChoosesTheDelegateWhereItIsFaster) {
  run_ranks(2,
            [](Rank& rank) {
              EXPECT_EQ(sum_ones(rank), DPT_DELEGATED);
              EXPECT_EQ(sum_ones(rank), DPT_DELEGATED);
              EXPECT_EQ(rank.delegate().calls.size(), 2);
              EXPECT_EQ(sum_ones(rank, 10), DPT_COMPLETED);
            },
            {.group = "outpaced", .tune = DPT_TUNE_AUTO, .execute = do_nothing});
  EXPECT_TRUE(is_delegate(*decision(2).decision.chosen));
  bool counted = false;
  for (const StatisticsRow& row : all_statistics()) {
    counted |= row.group == "outpaced" && row.reason == "faster than native, measured";
  }
  EXPECT_TRUE(counted);
}

TEST_F(Calibration, KeepsNativeWhereTheDelegateIsSlower) {
  run_ranks(2,
            [](Rank& rank) { EXPECT_EQ(sum_ones(rank), DPT_COMPLETED); },
            {.tune = DPT_TUNE_AUTO, .execute = take_long});
  const Decision chosen = decision(2).decision;
  EXPECT_EQ(chosen.chosen->algorithm, AlgorithmName::kPipelined);
  EXPECT_TRUE(is_delegate(chosen.times.back().candidate));
}

TEST_F(Calibration, GoesOnWithoutADelegateThatFails) {
  std::atomic<int> calls = 0;
  // It fails on one rank only: all must agree.
  const auto fail_once = [&](const dpt_request&) {
    return calls++ == 0 ? DPT_ERR_DELEGATE : DPT_OK;
  };
  run_ranks(2,
            [](Rank& rank) { EXPECT_EQ(sum_ones(rank), DPT_COMPLETED); },
            {.tune = DPT_TUNE_AUTO, .execute = fail_once});
  EXPECT_EQ(calls, 2);
  for (const Measurement& time : decision(2).decision.times) {
    EXPECT_FALSE(is_delegate(time.candidate));
  }
}

TEST_F(Calibration, OfAsynchronousOperationsKeepsTheirOrder) {
  run_ranks(3,
            [](Rank& rank) {
              std::vector<float> values(kCount, 1.0F);
              std::vector<Pending> pending;
              for (int i = 0; i < 6; ++i) pending.push_back(rank.start(sum_in_place(values)));
              rank.run(sum_in_place(values));
              for (Pending& each : pending) each.get();
              EXPECT_EQ(values, std::vector<float>(kCount, 2187.0F));  // 3^7
            },
            {.tune = DPT_TUNE_AUTO});
  EXPECT_EQ(decision(3).decision.source, "measured now");
}

TEST_F(Calibration, TheDelegateStaysInOrderWhileASizeIsUndecided) {
  run_ranks(2,
            [](Rank& rank) {
              std::vector<float> values(kCount, 1.0F);
              float one = 1;
              Request tuned = sum_in_place(values);
              const Pending first = rank.start(std::move(tuned));  // measured, then delegated
              Request second(DPT_REDUCE, DPT_FLOAT32, 1);          // delegated at once
              EXPECT_EQ(rank.run(second.not_native("for the test").input(&one).output(&one)),
                        DPT_DELEGATED);
              first.get();
              EXPECT_EQ(rank.delegate().calls,
                        (std::vector<dpt_collective>{DPT_ALL_REDUCE, DPT_REDUCE}));
            },
            {.tune = DPT_TUNE_AUTO, .execute = do_nothing});
}

TEST_F(Calibration, RankZerosSettingCountsForAll) {
  for (const bool rank_zero_tunes : {false, true}) {
    Decisions::instance().reset();
    HashStore store;
    run_threads(2, [&](int index) {
      const bool tunes = (index == 0) == rank_zero_tunes;
      Rank rank(store, index, 2, {.group = "mixed", .tune = tunes ? DPT_TUNE_AUTO : DPT_TUNE_OFF});
      sum_ones(rank);
    });
    EXPECT_EQ(num_decisions(), rank_zero_tunes ? 1 : 0);
  }
}

TEST_F(Calibration, FindsDifferentOperationsBeforeItMeasures) {
  run_ranks(2,
            [](Rank& rank) {
              // Rank 0's size is to be measured, rank 1's is not.
              std::vector<float> values(rank.rank() == 0 ? kCount : 10, 1.0F);
              const Failure failure = failure_of([&] { rank.run(sum_in_place(values)); });
              EXPECT_EQ(failure.status, DPT_ERR_MISMATCH);
              EXPECT_THAT(failure.what(), HasSubstr("65536 x float32"));
              EXPECT_THAT(failure.what(), HasSubstr("10 x float32"));
              sum_ones(rank);  // the group is none the worse for it
            },
            {.tune = DPT_TUNE_AUTO});
}

TEST_F(Calibration, EndsWhenAPeerLeaves) {
  run_ranks(2,
            [](Rank& rank) {
              rank.barrier();
              if (rank.rank() == 1) return rank.destroy();
              std::vector<float> values(kCount, 1.0F);
              const Failure failure = failure_of([&] { rank.run(sum_in_place(values)); });
              EXPECT_EQ(failure.status, DPT_ERR_PEER_LOST);
              EXPECT_THAT(failure.what(), StartsWith("all_reduce #2"));
            },
            {.tune = DPT_TUNE_AUTO});
}

TEST_F(Calibration, EndsWhenTheGroupIsAborted) {
  HashStore store;
  static thread_local Rank* self;  // measuring happens in the caller's thread
  const auto abort_in_the_middle = [](const dpt_request&) {
    self->abort("for the test");
    return DPT_OK;
  };
  run_threads(2, [&](int index) {
    Rank rank(store,
              index,
              2,
              {.group = "aborted", .tune = DPT_TUNE_AUTO, .execute = abort_in_the_middle});
    self = &rank;
    rank.barrier();
    const Failure failure = failure_of([&] { sum_ones(rank); });
    EXPECT_EQ(failure.status, DPT_ERR_ABORTED);
    EXPECT_THAT(failure.what(), HasSubstr("for the test"));
    EXPECT_THAT(failure_of([&] { rank.barrier(); }).what(), HasSubstr("failed earlier"));
  });
}

TEST_F(Calibration, KeepsTimesInTheProfile) {
  run_ranks(2, [](Rank& rank) { sum_ones(rank); }, {.tune = DPT_TUNE_AUTO, .profile = profile_});
  const Decision measured = decision(2).decision;
  Decisions::instance().reset();  // a new process
  run_ranks(2, [](Rank& rank) { sum_ones(rank); }, {.tune = DPT_TUNE_AUTO, .profile = profile_});
  const Decision loaded = decision(2).decision;
  EXPECT_EQ(loaded.source, "profile " + profile_);
  EXPECT_EQ(loaded.chosen->chunk_bytes, measured.chosen->chunk_bytes);
  EXPECT_THAT(loaded.reason, StartsWith("fastest in the profile"));
  Decisions::instance().reset();
  run_ranks(2, [](Rank& rank) { sum_ones(rank); }, {.tune = DPT_TUNE_FORCE, .profile = profile_});
  EXPECT_EQ(decision(2).decision.source, "measured now");
}

// Such times come from another build, or from people.
TEST_F(Calibration, WhatCannotServeInAProfileIsMeasuredAnew) {
  run_ranks(2, [](Rank& rank) { sum_ones(rank); }, {.tune = DPT_TUNE_AUTO, .profile = profile_});
  const std::string good = read_profile(profile_);
  for (const auto& [what, other] :
       {std::pair{R"("algorithm": "pipelined")", R"("algorithm": "exchange")"},
        std::pair{R"("algorithm": "pipelined")", R"("algorithm": "hierarchical")"},
        std::pair{R"("algorithm": "pipelined")", R"("algorithm": "two_shot")"},
        std::pair{R"("chunk_bytes": )", R"("chunk_bytes": 0)"}}) {
    const std::regex pattern(std::string(what) +
                             (std::string(other).ends_with("0") ? "[0-9]+" : ""));
    std::ofstream(profile_) << std::regex_replace(good, pattern, other);
    ASSERT_NE(read_profile(profile_), good);
    Decisions::instance().reset();
    run_ranks(2, [](Rank& rank) { sum_ones(rank); }, {.tune = DPT_TUNE_AUTO, .profile = profile_});
    EXPECT_EQ(decision(2).decision.source, "measured now") << other;
  }
}

TEST_F(Calibration, AProfileWithoutTheDelegateDoesNotServeOneThatCompetes) {
  run_ranks(2, [](Rank& rank) { sum_ones(rank); }, {.tune = DPT_TUNE_AUTO, .profile = profile_});
  Decisions::instance().reset();
  run_ranks(2,
            [](Rank& rank) { sum_ones(rank); },
            {.tune = DPT_TUNE_AUTO, .profile = profile_, .execute = take_long});
  EXPECT_EQ(decision(2).decision.source, "measured now");
}

TEST_F(Calibration, OnlyTheProfileMeansNothingIsMeasured) {
  run_ranks(2, [](Rank& rank) { sum_ones(rank); }, {.tune = DPT_TUNE_PROFILE, .profile = profile_});
  EXPECT_EQ(decision(2).decision.source, "rule of thumb");
  EXPECT_FALSE(std::filesystem::exists(profile_));
  run_ranks(3, [](Rank& rank) { sum_ones(rank); }, {.tune = DPT_TUNE_AUTO, .profile = profile_});
  Decisions::instance().reset();
  run_ranks(3, [](Rank& rank) { sum_ones(rank); }, {.tune = DPT_TUNE_PROFILE, .profile = profile_});
  EXPECT_EQ(decision(3).decision.source, "profile " + profile_);
}

TEST_F(Calibration, IgnoresAMalformedProfileAndLeavesItAlone) {
  std::ofstream(profile_) << "{\"format\": 1, \"grou";
  ::testing::internal::CaptureStderr();
  run_ranks(2,
            [](Rank& rank) {
              sum_ones(rank);
              sum_ones(rank, 16 * kCount);
            },
            {.tune = DPT_TUNE_AUTO, .profile = profile_});
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("warning: the profile " + profile_ + " is ignored"));
  EXPECT_THAT(said, HasSubstr("Remove it, or name another file"));
  EXPECT_EQ(said.find("is ignored"), said.rfind("is ignored"));
  EXPECT_EQ(read_profile(profile_), "{\"format\": 1, \"grou");
  EXPECT_EQ(decision(2).decision.source, "measured now");
}

TEST_F(Calibration, RunsOnWithoutAPlaceForTheProfile) {
  std::ofstream(folder_ / "file") << "in the way";
  run_ranks(2,
            [](Rank& rank) { sum_ones(rank); },
            {.tune = DPT_TUNE_AUTO, .profile = folder_ / "file" / "profile.json"});
  EXPECT_EQ(decision(2).decision.source, "measured now");
}

TEST_F(Calibration, StopsWhenTheBudgetIsSpent) {
  run_ranks(
      2,
      [](Rank& rank) {
        sum_ones(rank);
        rank.barrier();
        spend_budget();
        rank.barrier();
        sum_ones(rank, 4 * kCount);
        std::vector<float> values(kCount, 1.0F);
        rank.run(
            Request(DPT_BROADCAST, DPT_FLOAT32, kCount).input(values.data()).output(values.data()));
      },
      {.tune = DPT_TUNE_AUTO});
  EXPECT_EQ(decision(2, DPT_BROADCAST).decision.source, "rule of thumb");
  bool interpolated = false;
  for (const DecisionRow& row : Decisions::instance().rows()) {
    interpolated |= row.decision.source.starts_with("measured at 256 KiB");
  }
  EXPECT_TRUE(interpolated);
}

}  // namespace
}  // namespace dpt::testing
