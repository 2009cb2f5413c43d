// Operations on GPUs (fake_device.hpp): when they are native, and how the ranks find that out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <filesystem>

#include "comm/decisions.hpp"
#include "comm/fabric.hpp"
#include "comm/statistics.hpp"
#include "fake_device.hpp"
#include "rank_threads.hpp"
#include "units.hpp"

namespace dpt::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class DeviceTuning : public ::testing::Test {
 protected:
  DeviceTuning() {
    Decisions::instance().reset();
    reset_statistics();
    std::filesystem::create_directories(folder_);
    fake_devices() = {};
    fake_devices().why_absent = "";
    fake_devices().time_us = [](const DevicePlan&, size_t) { return 10.0; };
  }
  ~DeviceTuning() override {
    Decisions::instance().reset();
    fake_devices() = {};
    std::filesystem::remove_all(folder_);
  }

  // NCCL, at `time_us` for an operation.
  std::function<dpt_status(const dpt_request&)> stock(double time_us) {
    return [this, time_us](const dpt_request& request) {
      EXPECT_EQ(request.on_device, 1);
      EXPECT_EQ(request.dtype, DPT_BFLOAT16);
      ++stock_calls_;
      advance_device(time_us);
      return DPT_OK;
    };
  }

  static std::vector<DecisionRow> rows() { return Decisions::instance().rows(); }

  std::atomic<int> stock_calls_ = 0;
  std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("deepytorch-device-" + std::to_string(getpid()));
  std::string profile_ = folder_ / "profile.json";
};

Request on_device(Rank& rank, Request request, bool busy = false) {
  request.request.on_device = 1;
  request.request.device = rank.rank();
  request.request.stream = [](void*) -> void* { return nullptr; };
  if (busy) request.request.busy = [](void*) { return 1; };
  return request;
}

dpt_outcome sum_device_ones(Rank& rank, size_t bytes, bool busy = false) {
  std::vector<float> values(bytes / sizeof(float), 1.0F);
  Request request(DPT_ALL_REDUCE, DPT_FLOAT32, values.size());
  request.reduce_op(DPT_SUM).input(values.data()).output(values.data());
  const dpt_outcome outcome = rank.run(on_device(rank, std::move(request), busy));
  if (outcome == DPT_COMPLETED) {
    EXPECT_EQ(values, std::vector<float>(values.size(), static_cast<float>(rank.size())));
  }
  return outcome;
}

TEST_F(DeviceTuning, NativeServesWhereItIsFaster) {
  run_ranks(2,
            [](Rank& rank) {
              EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED);
              EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED);
            },
            {.tune = DPT_TUNE_AUTO, .execute = stock(11)});
  ASSERT_EQ(rows().size(), 1);
  const DecisionRow row = rows()[0];
  EXPECT_THAT(std::string(row.group.device), StartsWith("a fake GPU, 132 SMs, over"));
  EXPECT_EQ(row.decision.source, "measured now");
  EXPECT_EQ(row.decision.chosen->algorithm, AlgorithmName::kPacket);
  EXPECT_THAT(row.decision.reason, HasSubstr("64 x "));
  ASSERT_TRUE(is_delegate(row.decision.times.back().candidate));
  EXPECT_DOUBLE_EQ(row.decision.times.back().median_us, 11);
  EXPECT_DOUBLE_EQ(row.decision.times.front().median_us, 10);
}

TEST_F(DeviceTuning, TheDelegateStaysWhereNativeIsNotClearlyFaster) {
  run_ranks(2,
            [](Rank& rank) { EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_DELEGATED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(10.2)});
  EXPECT_TRUE(is_delegate(*rows().at(0).decision.chosen));
  EXPECT_EQ(rows()[0].decision.reason, "native is not clearly faster, measured");
}

uint64_t calls_counted(const std::string& group) {
  uint64_t calls = 0;
  for (const StatisticsRow& row : all_statistics()) {
    if (row.group != group || row.collective != DPT_ALL_REDUCE) continue;
    EXPECT_EQ(row.algorithm, AlgorithmName::kDelegate);
    EXPECT_EQ(row.reason, "native is not clearly faster, measured");
    calls += row.calls;
  }
  return calls;
}

TEST_F(DeviceTuning, WhatIsKnownToBeTheDelegatesIsCountedEachTime) {
  run_ranks(2,
            [](Rank& rank) {
              for (int i = 0; i < 3; ++i) EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_DELEGATED);
              EXPECT_EQ(rank.delegate().calls.size(), 3);
              EXPECT_EQ(rank.num_known(), 2);
              rank.barrier();
              EXPECT_EQ(calls_counted("known"), 6);
              rank.barrier();
              reset_statistics();
              rank.barrier();
              EXPECT_EQ(calls_counted("known"), 0);
              rank.barrier();
              EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_DELEGATED);
              EXPECT_EQ(sum_device_ones(rank, 2 * kMiB - 4, true),
                        DPT_DELEGATED);  // of the same range
              rank.barrier();
              EXPECT_EQ(calls_counted("known"), 4);
            },
            {.group = "known", .tune = DPT_TUNE_AUTO, .execute = stock(10.2)});
}

TEST_F(DeviceTuning, SmallMessagesAreNativeUnmeasured) {
  run_ranks(2,
            [](Rank& rank) { EXPECT_EQ(sum_device_ones(rank, 16 * kKiB), DPT_COMPLETED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(1)});
  EXPECT_EQ(stock_calls_, 0);
  EXPECT_EQ(rows().size(), 0);
}

TEST_F(DeviceTuning, TheFastestGridIsChosen) {
  fake_devices().time_us = [](const DevicePlan& plan, size_t) {
    return plan.grid.channels == 16 ? 5.0 : 10.0;
  };
  run_ranks(2,
            [](Rank& rank) { EXPECT_EQ(sum_device_ones(rank, 4 * kMiB), DPT_COMPLETED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_EQ(rows().at(0).decision.chosen->channels, 16);
}

// One call may take tens of milliseconds, where GPUs have no peer access.
TEST_F(DeviceTuning, LongOnesAreTriedLessOftenAtFirst) {
  for (const auto& [bytes, first_calls] : {std::pair{16 * kMiB, 4}, {64 * kMiB, 1}}) {
    Decisions::instance().reset();
    constexpr size_t kNone = ~size_t{0};
    std::atomic<size_t> first_chunk = kNone;
    std::atomic<int> calls_of_first = 0;
    std::atomic<bool> is_next = false;
    fake_devices().time_us = [&](const DevicePlan& plan, size_t) {
      size_t none = kNone;
      first_chunk.compare_exchange_strong(none, plan.chunk_bytes);
      if (plan.chunk_bytes != first_chunk) is_next = true;
      if (!is_next) ++calls_of_first;
      return 1000.0;
    };
    run_ranks(2,
              [&, bytes = bytes](Rank& rank) { sum_device_ones(rank, bytes); },
              {.tune = DPT_TUNE_AUTO, .execute = stock(2000)});
    // One that is not timed, of each rank.
    EXPECT_EQ(calls_of_first, 2 * (1 + first_calls)) << bytes;
  }
}

TEST_F(DeviceTuning, AGroupThatIsAlikeMeasuresNothing) {
  const RankOptions options{.tune = DPT_TUNE_AUTO, .execute = stock(20)};
  run_ranks(2, [](Rank& rank) { sum_device_ones(rank, kMiB); }, options);
  const int calls = stock_calls_;
  EXPECT_GT(calls, 0);
  run_ranks(2, [](Rank& rank) { EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED); }, options);
  EXPECT_EQ(stock_calls_, calls);
  EXPECT_EQ(rows().at(0).decision.source, "measured in this run");
}

TEST_F(DeviceTuning, ABusyStreamLeavesTheRangeOpen) {
  run_ranks(2,
            [](Rank& rank) {
              const bool one_is_busy = rank.rank() == 1;
              EXPECT_EQ(sum_device_ones(rank, kMiB, one_is_busy), DPT_DELEGATED);
              EXPECT_EQ(sum_device_ones(rank, 64 * kKiB, true), DPT_COMPLETED);
              rank.barrier();
              EXPECT_EQ(rows().size(), 0);
              rank.barrier();
              EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED);
              EXPECT_EQ(sum_device_ones(rank, kMiB, true), DPT_COMPLETED);
            },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_EQ(rows().size(), 1);
}

TEST_F(DeviceTuning, AGroupThatIsAlwaysBusyStopsAsking) {
  run_ranks(2,
            [](Rank& rank) {
              for (int i = 0; i < 70; ++i)
                EXPECT_EQ(sum_device_ones(rank, kMiB, true), DPT_DELEGATED);
            },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_EQ(rows().at(0).decision.source, "rule of thumb");
}

TEST_F(DeviceTuning, WithoutTuningTheRuleOfThumbLeavesLargeOnesToTheDelegate) {
  run_ranks(2,
            [](Rank& rank) {
              EXPECT_EQ(sum_device_ones(rank, 128 * kKiB), DPT_COMPLETED);
              EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_DELEGATED);
            },
            {.tune = DPT_TUNE_OFF, .execute = stock(20)});
  EXPECT_EQ(stock_calls_, 0);
  // collectives=native: no delegate competes.
  run_ranks(2, [](Rank& rank) { EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED); });
}

TEST_F(DeviceTuning, WhatNativeCanDoIsNeverDelegatedWhereNoDelegateCompetes) {
  run_ranks(2,
            [](Rank& rank) { EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED); },
            {.tune = DPT_TUNE_AUTO});
  EXPECT_EQ(rows().at(0).decision.chosen->algorithm, AlgorithmName::kPacket);
}

TEST_F(DeviceTuning, RanksThatShareAGpuHaveNoDelegate) {
  fake_devices().shared = true;
  run_ranks(2,
            [](Rank& rank) { EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(1)});
  EXPECT_EQ(stock_calls_, 0);
}

TEST_F(DeviceTuning, ADelegateThatFailsIsNoCandidate) {
  run_ranks(
      2,
      [](Rank& rank) { EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED); },
      {.tune = DPT_TUNE_AUTO, .execute = [](const dpt_request&) { return DPT_ERR_DELEGATE; }});
  const Decision decision = rows().at(0).decision;
  for (const Measurement& time : decision.times) {
    EXPECT_FALSE(is_delegate(time.candidate));
  }
}

TEST_F(DeviceTuning, TypesWithoutLargeKernelsGoByTheRuleWhereALargeOneWon) {
  run_ranks(2,
            [](Rank& rank) {
              EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED);
              std::vector<double> wide(kMiB / sizeof(double));
              Request request(DPT_ALL_REDUCE, DPT_FLOAT64, wide.size());
              request.reduce_op(DPT_SUM).input(wide.data()).output(wide.data());
              EXPECT_EQ(rank.run(on_device(rank, std::move(request))), DPT_DELEGATED);
            },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
}

// An all_to_all of 512 KiB for each rank.
dpt_outcome exchange_parts(Rank& rank, bool even) {
  std::vector<float> values(kMiB / sizeof(float));
  Request request(DPT_ALL_TO_ALL, DPT_FLOAT32, values.size() / 2);
  for (int part = 0; part < rank.size(); ++part) request.input(values.data()).output(values.data());
  const std::vector<size_t> counts(rank.size(), values.size() / 2);
  if (!even) request.counts(counts, counts);
  return rank.run(on_device(rank, std::move(request)));
}

TEST_F(DeviceTuning, ExchangesOfUnknownSizesAreTheDelegates) {
  run_ranks(2,
            [](Rank& rank) { EXPECT_EQ(exchange_parts(rank, /*even=*/false), DPT_DELEGATED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_EQ(rows().size(), 0);
}

TEST_F(DeviceTuning, ExchangesOfOneSizeAreMeasured) {
  run_ranks(2,
            [](Rank& rank) { EXPECT_EQ(exchange_parts(rank, /*even=*/true), DPT_COMPLETED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_EQ(rows().at(0).collective, DPT_ALL_TO_ALL);
  EXPECT_EQ(rows()[0].decision.source, "measured now");
}

// Ranks 0 and 2 are on one node, 1 and 3 on another.
class DevicesOnNodes : public DeviceTuning {
 protected:
  DevicesOnNodes() {
    Fabric::instance().emulate_nodes({"a", "b", "a", "b"});
    fake_devices().free_bytes = 64 * kMiB;
  }
  ~DevicesOnNodes() override { Fabric::instance().emulate_nodes({}); }

  // NCCL in one ring and in stages, which fail on rank `broken`.
  std::function<dpt_status(const dpt_request&)> stock_by_nodes(
      double flat_us, const std::function<double(size_t)>& stages_us, int broken = -1) {
    return [=, this](const dpt_request& request) {
      if (request.on_device == 0) return DPT_OK;  // the ranks meet
      ++stock_calls_;
      const bool in_stages = request.node_of != nullptr;
      if (in_stages && request.device == broken) return DPT_ERR_DELEGATE;
      const size_t bytes = request.count * size_of(request.dtype);
      advance_device(in_stages ? stages_us(bytes) : flat_us);
      return DPT_OK;
    };
  }

  // How this rank's next all_reduce goes.
  static std::string way_of(Rank& rank, size_t bytes) {
    rank.delegate().node_of.clear();
    EXPECT_EQ(sum_device_ones(rank, bytes), DPT_DELEGATED);
    return rank.delegate().node_of.empty() ? "flat" : "in stages";
  }
};

TEST_F(DevicesOnNodes, LargeOnesGoByNodes) {
  run_ranks(4, [](Rank& rank) {
    EXPECT_EQ(sum_device_ones(rank, 1 * kMiB), DPT_DELEGATED);
    EXPECT_EQ(exchange_parts(rank, /*even=*/true), DPT_DELEGATED);
    EXPECT_TRUE(rank.delegate().node_of.empty());
    EXPECT_EQ(sum_device_ones(rank, 8 * kMiB), DPT_DELEGATED);
    EXPECT_EQ(rank.delegate().node_of, std::vector<int>({0, 1, 0, 1}));
    EXPECT_EQ(rank.delegate().calls.size(), 3);
  });
  EXPECT_EQ(stock_calls_, 0);
}

TEST_F(DevicesOnNodes, NodesThatDifferGoInOneRing) {
  Fabric::instance().emulate_nodes({"a", "b", "a", "a"});
  run_ranks(4, [](Rank& rank) {
    EXPECT_EQ(sum_device_ones(rank, 8 * kMiB), DPT_DELEGATED);
    EXPECT_TRUE(rank.delegate().node_of.empty());
  });
}

TEST_F(DevicesOnNodes, ADelegateThatCompetesGoesInStagesWhereThatIsFaster) {
  const auto faster_from_16_mib = [](size_t bytes) { return bytes < 16 * kMiB ? 2000.0 : 900.0; };
  run_ranks(4,
            [](Rank& rank) {
              EXPECT_EQ(way_of(rank, 4 * kMiB), "flat");
              for (const size_t bytes : {8 * kMiB, 64 * kMiB}) {
                for (int i = 0; i < 2; ++i) EXPECT_EQ(way_of(rank, bytes), "in stages");
              }
              EXPECT_EQ(rank.num_known(), 2);
            },
            {.group = "competes",
             .tune = DPT_TUNE_AUTO,
             .execute = stock_by_nodes(1000, faster_from_16_mib)});
  // Rows of 4 and 16 MiB, and of 4 to 64 MiB in four parts.
  ASSERT_EQ(rows().size(), 2 + 3 + 3 + 3);
  for (const DecisionRow& row : rows()) {
    EXPECT_EQ(row.group.nodes, 2);
    EXPECT_THAT(std::string(row.group.device), EndsWith(", in stages of NCCL"));
    const bool is_large = row.collective == DPT_ALL_REDUCE && row.bytes.nominal == 16 * kMiB;
    EXPECT_EQ(row.decision.chosen->algorithm,
              is_large ? AlgorithmName::kInStages : AlgorithmName::kDelegate);
    EXPECT_EQ(row.decision.times.size(), 2);
    // There is no memory for larger ones in parts, which are not measured again and again.
    const bool is_smaller = row.collective != DPT_ALL_REDUCE && row.bytes.nominal > kMiB;
    EXPECT_EQ(row.decision.source, is_smaller ? "measured now at 1 MiB" : "measured now");
  }
  for (const StatisticsRow& row : all_statistics()) {
    if (row.group != "competes" || row.algorithm != AlgorithmName::kInStages) continue;
    EXPECT_EQ(row.reason, "fastest measured, within nodes and between them");
  }
}

TEST_F(DevicesOnNodes, ADelegateThatCompetesStaysFlatWhereStagesAreNotClearlyFaster) {
  run_ranks(4,
            [](Rank& rank) { EXPECT_EQ(way_of(rank, 16 * kMiB), "flat"); },
            {.tune = DPT_TUNE_AUTO, .execute = stock_by_nodes(100, [](size_t) { return 98.0; })});
  ASSERT_EQ(rows().size(), 11);
  EXPECT_EQ(rows()[0].decision.reason, "stages are not clearly faster, measured");
}

TEST_F(DevicesOnNodes, WhereOneRankCantSetUpStagesAllStayFlat) {
  const auto execute = stock_by_nodes(100, [](size_t) { return 10.0; }, /*broken=*/2);
  run_ranks(4,
            [](Rank& rank) { EXPECT_EQ(way_of(rank, 16 * kMiB), "flat"); },
            {.tune = DPT_TUNE_AUTO, .execute = execute});
  EXPECT_EQ(stock_calls_, 2 * 4);  // each rank tried both once
  for (const DecisionRow& row : rows()) EXPECT_EQ(row.decision.source, "rule of thumb");
}

TEST_F(DevicesOnNodes, StagesDoNotWinBecauseTheRingFails) {
  const auto stages = stock_by_nodes(100, [](size_t) { return 10.0; });
  std::atomic<int> in_ring = 0;
  const auto fails_later = [&](const dpt_request& request) {
    const bool is_ring = request.on_device != 0 && request.node_of == nullptr;
    if (is_ring && request.device == 2 && ++in_ring > 1) return DPT_ERR_DELEGATE;
    return stages(request);
  };
  run_ranks(4,
            [](Rank& rank) { EXPECT_EQ(way_of(rank, 16 * kMiB), "flat"); },
            {.tune = DPT_TUNE_AUTO, .execute = fails_later});
  EXPECT_EQ(in_ring, 2);  // nothing is tried for other sizes
  for (const DecisionRow& row : rows()) EXPECT_EQ(row.decision.source, "rule of thumb");
}

TEST_F(DevicesOnNodes, WithoutMeasuringADelegateThatCompetesStaysFlat) {
  const auto execute = stock_by_nodes(100, [](size_t) { return 10.0; });
  const auto stays_flat = [](Rank& rank) {
    EXPECT_EQ(way_of(rank, 16 * kMiB), "flat");
    EXPECT_EQ(way_of(rank, 16 * kMiB), "flat");
  };
  for (const dpt_tune tune : {DPT_TUNE_OFF, DPT_TUNE_PROFILE}) {
    run_ranks(4, stays_flat, {.tune = tune, .profile = profile_, .execute = execute});
  }
  // A graph is captured on one rank.
  run_ranks(4,
            [](Rank& rank) {
              EXPECT_EQ(sum_device_ones(rank, 16 * kMiB, rank.rank() == 1), DPT_DELEGATED);
              EXPECT_EQ(way_of(rank, 16 * kMiB), "flat");
            },
            {.tune = DPT_TUNE_AUTO, .execute = execute});
  // Ranks that share a GPU, which NCCL refuses.
  fake_devices().shared = true;
  run_ranks(4, stays_flat, {.tune = DPT_TUNE_AUTO, .execute = execute});
  fake_devices().shared = false;
  spend_budget();
  run_ranks(4, stays_flat, {.tune = DPT_TUNE_AUTO, .execute = execute});
  EXPECT_EQ(stock_calls_, 0);
}

TEST_F(DevicesOnNodes, WhereItCompetesOnSomeRanksOnlyAllStayFlat) {
  const auto execute = stock_by_nodes(100, [](size_t) { return 10.0; });
  HashStore store;
  run_threads(4, [&](int rank) {
    RankOptions options{.group = "mixed", .tune = DPT_TUNE_AUTO};
    if (rank != 1) options.execute = execute;
    Rank member(store, rank, 4, options);
    EXPECT_EQ(way_of(member, 16 * kMiB), "flat");
  });
  EXPECT_EQ(stock_calls_, 0);
}

TEST_F(DevicesOnNodes, AGroupThatIsAlikeGoesByWhatIsKnown) {
  const auto execute = stock_by_nodes(100, [](size_t) { return 10.0; });
  for (int i = 0; i < 2; ++i) {
    run_ranks(4,
              [](Rank& rank) { EXPECT_EQ(way_of(rank, 16 * kMiB), "in stages"); },
              {.tune = DPT_TUNE_AUTO, .execute = execute});
  }
  EXPECT_EQ(rows().at(0).decision.source, "measured in this run");
}

TEST_F(DeviceTuning, MessagesAreTheDelegates) {
  run_ranks(2,
            [](Rank& rank) {
              float value = 0;
              Request request(rank.rank() == 0 ? DPT_SEND : DPT_RECV, DPT_FLOAT32, 1);
              request.root(1 - rank.rank()).input(&value).output(&value);
              EXPECT_EQ(rank.run(on_device(rank, std::move(request))), DPT_DELEGATED);
            },
            {.tune = DPT_TUNE_AUTO});
}

TEST_F(DeviceTuning, LittleMemoryMeansSmallerTrials) {
  fake_devices().free_bytes = 4 * kMiB;
  fake_devices().time_us = [](const DevicePlan& plan, size_t) {
    return plan.algorithm == AlgorithmName::kTwoShot ? 9.0 : 10.0;  // it serves any size
  };
  run_ranks(2,
            [](Rank& rank) { EXPECT_EQ(sum_device_ones(rank, 8 * kMiB), DPT_COMPLETED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_EQ(rows().at(0).decision.source, "measured now at 1 MiB");
  EXPECT_LE(rows()[0].bytes.first, 8 * kMiB);
}

TEST_F(DeviceTuning, WhereLaunchesWaitNothingIsMeasured) {
  fake_devices().queues = false;
  run_ranks(2,
            [](Rank& rank) { EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_DELEGATED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_EQ(rows().at(0).decision.source, "rule of thumb");
  EXPECT_EQ(stock_calls_, 0);
}

TEST_F(DeviceTuning, WithTheBudgetSpentOnlyTheNextRangesTimesServe) {
  fake_devices().time_us = [](const DevicePlan& plan, size_t) {
    return plan.algorithm == AlgorithmName::kTwoShot ? 9.0 : 10.0;  // it serves any size
  };
  run_ranks(2,
            [](Rank& rank) {
              EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED);
              rank.barrier();
              spend_budget();
              rank.barrier();
              EXPECT_EQ(sum_device_ones(rank, 4 * kMiB), DPT_COMPLETED);
              EXPECT_EQ(sum_device_ones(rank, 16 * kMiB), DPT_DELEGATED);
            },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
}

TEST_F(DeviceTuning, TheProfileServesTheNextRun) {
  const RankOptions options{.tune = DPT_TUNE_AUTO, .profile = profile_, .execute = stock(20)};
  run_ranks(2, [](Rank& rank) { sum_device_ones(rank, kMiB); }, options);
  const Decision measured = rows().at(0).decision;
  for (const dpt_tune tune : {DPT_TUNE_AUTO, DPT_TUNE_PROFILE}) {
    Decisions::instance().reset();  // a new process
    stock_calls_ = 0;
    run_ranks(2,
              [](Rank& rank) { EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED); },
              {.tune = tune, .profile = profile_, .execute = stock(20)});
    EXPECT_EQ(stock_calls_, 0);
    const Decision loaded = rows().at(0).decision;
    EXPECT_EQ(loaded.source, "profile " + profile_);
    EXPECT_EQ(loaded.chosen->channels, measured.chosen->channels);
    EXPECT_EQ(loaded.chosen->threads, measured.chosen->threads);
  }
}

TEST_F(DeviceTuning, RepeatableRunsMeasureNothing) {
  run_ranks(2,
            [](Rank& rank) {
              EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_DELEGATED);
              EXPECT_EQ(sum_device_ones(rank, 64 * kKiB), DPT_COMPLETED);
            },
            {.tune = DPT_TUNE_PROFILE, .profile = profile_, .execute = stock(20)});
  EXPECT_EQ(stock_calls_, 0);
}

TEST_F(DeviceTuning, TheBudgetIsOneForHostAndDevice) {
  spend_budget();
  run_ranks(2,
            [](Rank& rank) { EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_DELEGATED); },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_EQ(rows().at(0).decision.source, "rule of thumb");
}

TEST_F(DeviceTuning, DifferentSizesAreFoundBeforeItMeasures) {
  run_ranks(2,
            [](Rank& rank) {
              const size_t bytes = rank.rank() == 0 ? kMiB : kMiB + 8;
              const Failure failure = failure_of([&] { sum_device_ones(rank, bytes); });
              EXPECT_EQ(failure.status, DPT_ERR_MISMATCH);
              EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED);  // none the worse for it
            },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
}

Request all_reduce(std::vector<float>& values, int64_t timeout_ms) {
  Request request(DPT_ALL_REDUCE, DPT_FLOAT32, values.size());
  request.reduce_op(DPT_SUM).input(values.data()).output(values.data()).timeout_ms(timeout_ms);
  return request;
}

// On a stream rank 0's operation would not keep rank 0 from what rank 1 waits for on the host.
TEST_F(DeviceTuning, RanksThatComeAtDifferentTimesGoOnWithoutMeasuring) {
  std::barrier<> rank_zero_went_on(2);
  run_ranks(2,
            [&](Rank& rank) {
              sum_device_ones(rank, 8);  // the ranks meet
              std::vector<float> values(kMiB / sizeof(float));
              if (rank.rank() == 1) rank_zero_went_on.arrive_and_wait();
              EXPECT_EQ(rank.run(on_device(rank, all_reduce(values, 400))), DPT_DELEGATED);
              if (rank.rank() == 0) rank_zero_went_on.arrive_and_wait();
              // Once is enough: nobody waits with another size of this group.
              values.resize(4 * values.size());
              EXPECT_EQ(rank.run(on_device(rank, all_reduce(values, 1 << 30))), DPT_DELEGATED);
            },
            {.tune = DPT_TUNE_AUTO, .execute = stock(20)});
  EXPECT_EQ(stock_calls_, 0);
  EXPECT_EQ(rows().size(), 2);
  for (const DecisionRow& row : rows()) {
    EXPECT_EQ(row.decision.source, "rule of thumb: ranks come at different times");
  }
}

TEST_F(DeviceTuning, HostAndDeviceOperationsTakeTurns) {
  run_ranks(3,
            [](Rank& rank) {
              std::vector<float> values(100000, 1.0F);
              Request request(DPT_ALL_REDUCE, DPT_FLOAT32, values.size());
              request.reduce_op(DPT_SUM).input(values.data()).output(values.data());
              const Pending pending = rank.start(std::move(request));
              EXPECT_EQ(sum_device_ones(rank, kMiB), DPT_COMPLETED);
              EXPECT_EQ(sum_device_ones(rank, 4 * kMiB), DPT_COMPLETED);
              pending.get();
              EXPECT_EQ(values, std::vector<float>(values.size(), 3.0F));
            },
            {.tune = DPT_TUNE_AUTO});
  EXPECT_EQ(rows().size(), 3);
}

}  // namespace
}  // namespace dpt::testing
