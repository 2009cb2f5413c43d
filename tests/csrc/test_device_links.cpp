// Links between the GPUs of a group: what ranks make of what each of them sees, and the groups that
// come of it (fake_device.hpp).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "comm/decisions.hpp"
#include "cuda/trees/device_links.hpp"
#include "fake_device.hpp"
#include "rank_threads.hpp"
#include "units.hpp"

namespace dpt::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string links_of(const std::vector<LinksSeen>& ranks) { return to_text(links_between(ranks)); }

TEST(LinksBetween, AreTheWorseOfWhatTwoRanksSee) {
  EXPECT_EQ(links_of({{{0, 4, 2}}, {{3, 0, 1}}, {{2, 1, 0}}}), "-32 3-1 21-");
  EXPECT_EQ(links_of({{{0, 4}}, {{LinkMatrix::kPcie, 0}}}), "-p p-");
  EXPECT_EQ(links_of({{{0, LinkMatrix::kNone}}, {{4, 0}}}), "-- --");
}

TEST(LinksBetween, AreKnownWhereOneOfTwoRanksSeesThem) {
  EXPECT_EQ(links_of({{{0, kUnseen, 2}}, {{3, 0, kNvlinksUncounted}}, {{kUnseen, 1, 0}}}),
            "-32 3-1 21-");
  EXPECT_EQ(links_of({{{0, kUnseen}}, {{kUnseen, 0}}}), "-p p-");
}

TEST(LinksBetween, AreAlikeWhereNvlinksAreNotCounted) {
  constexpr int8_t kMany = kNvlinksUncounted;
  EXPECT_EQ(links_of({{{0, kMany, 0}}, {{kMany, 0, 4}}, {{0, 4, 0}}}), "-1p 1-1 p1-");
}

TEST(LinksBetween, OfRanksThatShareAGpuAreTheBestOfOthers) {
  constexpr int8_t kSame = kSameGpu;
  EXPECT_EQ(links_of({{{0, kSame}}, {{kSame, 0}}}), "-1 1-");
  EXPECT_EQ(links_of({{{0, kSame, 18}}, {{kSame, 0, 18}}, {{18, 18, 0}}}), "-ii i-i ii-");
  EXPECT_EQ(links_of({{{0, kSame, 0}}, {{kSame, 0, 0}}, {{0, 0, 0}}}), "-pp p-p pp-");
  constexpr int8_t kMany = kNvlinksUncounted;
  EXPECT_EQ(links_of({{{0, kSame, kMany}}, {{kSame, 0, kMany}}, {{kMany, kMany, 0}}}),
            "-11 1-1 11-");
}

TEST(EmulatedLinks, AreThoseOfGlobalRanks) {
  EXPECT_EQ(emulated_link("", 0, 1), std::nullopt);
  const std::string line = "-2-,2-p,-p-";
  EXPECT_EQ(emulated_link(line, 0, 1), 2);
  EXPECT_EQ(emulated_link(line, 2, 1), LinkMatrix::kPcie);
  EXPECT_EQ(emulated_link(line, 0, 2), LinkMatrix::kNone);
  for (const auto& [text, peer, said] : {std::tuple{"-2,", 1, "expected a row for each"},
                                         std::tuple{"-2,2-", 5, "row for rank 5"}}) {
    try {
      emulated_link(text, 0, peer);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), DPT_ERR_INVALID);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("DEEPYTORCH_EMULATE_LINKS="), HasSubstr(said)));
    }
  }
}

TEST(Wiring, IsPartialWhereALinkIsMissing) {
  EXPECT_EQ(wiring_of(*parse_links("-4,4-")), cuda::Wiring::kAlike);
  EXPECT_EQ(wiring_of(*parse_links("-4p,4-p,pp-")), cuda::Wiring::kUnequal);
  EXPECT_EQ(wiring_of(*parse_links("-4-,4-4,-4-")), cuda::Wiring::kPartial);
  EXPECT_EQ(neighbours_of(*parse_links("-4-,4-4,-4-"), 1), 0b101u);
  EXPECT_EQ(neighbours_of(*parse_links("-4-,4-4,-4-"), 2), 0b010u);
}

class LinkedDevices : public ::testing::Test {
 protected:
  LinkedDevices() {
    Decisions::instance().reset();
    fake_devices() = {};
    fake_devices().why_absent = "";
    fake_devices().time_us = [](const DevicePlan& plan, size_t) {
      return plan.algorithm == AlgorithmName::kTree ? 5.0 : 10.0;
    };
  }
  ~LinkedDevices() override {
    Decisions::instance().reset();
    fake_devices() = {};
  }

  // NCCL, at `time_us` for an operation.
  static std::function<dpt_status(const dpt_request&)> stock(double time_us) {
    return [time_us](const dpt_request&) { return advance_device(time_us), DPT_OK; };
  }
  static DecisionRow decision() {
    const std::vector<DecisionRow> rows = Decisions::instance().rows();
    EXPECT_EQ(rows.size(), 1);
    return rows.at(0);
  }
  static bool has_trees(const Entry& times) {
    return std::any_of(times.begin(), times.end(), [](const Measurement& each) {
      return each.candidate.algorithm == AlgorithmName::kTree;
    });
  }
};

dpt_outcome run(Rank& rank, Collective collective, DataType dtype, size_t bytes) {
  std::vector<char> input(bytes * rank.size());
  std::vector<char> output(bytes * rank.size());
  Request request(collective, dtype, bytes / size_of(dtype));
  if (collective == DPT_ALL_REDUCE) request.reduce_op(DPT_SUM);
  request.input(input.data());
  for (int peer = 0; peer < rank.size(); ++peer) {
    request.output(output.data() + peer * bytes);
    if (collective != DPT_ALL_GATHER) break;
  }
  request.request.on_device = 1;
  request.request.device = rank.rank();
  request.request.stream = [](void*) -> void* { return nullptr; };
  return rank.run(request);
}
dpt_outcome reduce(Rank& rank, size_t bytes, DataType dtype = DPT_FLOAT32) {
  return run(rank, DPT_ALL_REDUCE, dtype, bytes);
}

TEST_F(LinkedDevices, OfOneKindAreAsBefore) {
  run_ranks(3,
            [](Rank& rank) { EXPECT_EQ(reduce(rank, 4 * kMiB), DPT_COMPLETED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_EQ(decision().group.device, "a fake GPU, 132 SMs, over NVLink");
  EXPECT_FALSE(has_trees(decision().decision.times));
}

TEST_F(LinkedDevices, OfTwoKindsTryTreesBesideTheOthers) {
  fake_devices().links = "-1pp,1-pp,pp-1,pp1-";
  run_ranks(4,
            [](Rank& rank) { EXPECT_EQ(reduce(rank, 4 * kMiB), DPT_COMPLETED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_EQ(decision().group.device,
            "a fake GPU, 132 SMs, not all over NVLink, links -1pp 1-pp pp-1 pp1-");
  EXPECT_EQ(decision().decision.chosen->algorithm, AlgorithmName::kTree);
  EXPECT_THAT(decision().decision.reason, HasSubstr("fastest measured"));
}

TEST_F(LinkedDevices, TreesThatAreSlowerAreNotChosen) {
  fake_devices().links = "-1pp,1-pp,pp-1,pp1-";
  fake_devices().time_us = [](const DevicePlan& plan, size_t) {
    return plan.algorithm == AlgorithmName::kTree ? 15.0 : 10.0;
  };
  run_ranks(4,
            [](Rank& rank) { EXPECT_EQ(reduce(rank, 4 * kMiB), DPT_COMPLETED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_TRUE(has_trees(decision().decision.times));
  EXPECT_EQ(decision().decision.chosen->algorithm, AlgorithmName::kPacket);
}

TEST_F(LinkedDevices, WithGapsGoAlongTreesWhereThatIsFaster) {
  fake_devices().links = "-11-,1--1,1--1,-11-";  // a ring
  run_ranks(4,
            [](Rank& rank) {
              EXPECT_EQ(reduce(rank, 4 * kMiB), DPT_COMPLETED);
              EXPECT_EQ(reduce(rank, 4 * kMiB + 4), DPT_COMPLETED);
              EXPECT_EQ(reduce(rank, kMiB, DPT_FLOAT64), DPT_DELEGATED);
              EXPECT_EQ(run(rank, DPT_ALL_GATHER, DPT_FLOAT32, kMiB), DPT_DELEGATED);
              EXPECT_EQ(run(rank, DPT_BROADCAST, DPT_FLOAT32, 64), DPT_DELEGATED);
              EXPECT_EQ(reduce(rank, 1024), DPT_DELEGATED);  // not measured
            },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_EQ(decision().group.device, "a fake GPU, 132 SMs, links -11- 1--1 1--1 -11-");
  EXPECT_EQ(decision().decision.chosen->algorithm, AlgorithmName::kTree);
  for (const Measurement& each : decision().decision.times) {
    EXPECT_TRUE(each.candidate.algorithm == AlgorithmName::kTree || is_delegate(each.candidate));
  }
}

// Variables are read once in a process, so this is one of its own.
TEST_F(LinkedDevices, AreMaskedByTheVariable) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  setenv("DEEPYTORCH_EMULATE_LINKS", "-4-,4-4,-4-", 1);
  const auto in_its_own_process = [] {
    run_ranks(3,
              [](Rank& rank) { EXPECT_EQ(reduce(rank, 4 * kMiB), DPT_COMPLETED); },
              {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
    EXPECT_EQ(decision().group.device, "a fake GPU, 132 SMs, links -4- 4-4 -4-, emulated");
    EXPECT_EQ(decision().decision.chosen->algorithm, AlgorithmName::kTree);
    Decisions::instance().reset();
    run_ranks(2,
              [](Rank& rank) { EXPECT_EQ(reduce(rank, 4 * kMiB), DPT_COMPLETED); },
              {.global_ranks = {1, 2}, .tune = DPT_TUNE_AUTO, .execute = stock(20)});
    EXPECT_EQ(decision().group.device, "a fake GPU, 132 SMs, over NVLink, emulated");
    std::exit(HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(in_its_own_process(), ::testing::ExitedWithCode(0), "");
  unsetenv("DEEPYTORCH_EMULATE_LINKS");
}

TEST_F(LinkedDevices, WithGapsAreTheDelegatesWhereTreesAreNoFaster) {
  fake_devices().links = "-1-,1-1,-1-";
  run_ranks(3,
            [](Rank& rank) { EXPECT_EQ(reduce(rank, 4 * kMiB), DPT_DELEGATED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(5)});
  EXPECT_TRUE(has_trees(decision().decision.times));
}

TEST_F(LinkedDevices, WithGapsGoAlongTreesWhereNoDelegateCompetes) {
  fake_devices().links = "-1-,1-1,-1-";
  run_ranks(3, [](Rank& rank) {
    for (const size_t bytes : {size_t{4}, size_t{1000}, kMiB, 8 * kMiB}) {
      EXPECT_EQ(reduce(rank, bytes), DPT_COMPLETED);
    }
  });
}

}  // namespace
}  // namespace dpt::testing
