// Groups of GPUs without peer access: when CPU-Reduce serves, what it gives, and how it ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#include "comm/fabric.hpp"
#include "staged_program.hpp"
#include "tuner/choose_staged.hpp"
#include "units.hpp"

namespace dpt::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(CpuReduce, ServesFourCollectives) {
  run_ranks(3, [](Rank& rank) {
    Program program(rank);
    for (const size_t bytes : {4UL, 100004UL, 3 * kMiB}) {
      EXPECT_EQ(program.sum_ones(bytes), DPT_COMPLETED);
      program.check_sum();
    }
    program.gather_and_scatter(DPT_MAX);
    EXPECT_EQ(program.broadcast_from_2(), DPT_COMPLETED);
    EXPECT_EQ(program.values(), std::vector<float>(program.values().size(), 2.0F));
  });
  EXPECT_THAT(reason_of(AlgorithmName::kCpuReduce), HasSubstr("no peer access"));
}

// Bridges that join some, but leave no way to the others.
TEST_F(CpuReduce, ServesGpusInPartsThatDoNotReachEachOther) {
  fake_devices().peer_access = true;
  fake_devices().links = "-4--,4---,---4,--4-";
  run_ranks(4, [](Rank& rank) {
    Program program(rank);
    EXPECT_EQ(program.sum_ones(kMiB), DPT_COMPLETED);
    program.check_sum();
  });
  EXPECT_THAT(reason_of(AlgorithmName::kCpuReduce), HasSubstr("no peer access"));
}

TEST_F(CpuReduce, OthersAreTheDelegates) {
  run_ranks(2, [](Rank& rank) {
    Program program(rank);
    std::vector<float> values(200, 1.0F);
    Request exchange(DPT_ALL_TO_ALL, DPT_FLOAT32, 100);
    std::vector<float> received(200);
    for (int peer = 0; peer < 2; ++peer) {
      exchange.input(values.data() + 100 * peer).output(received.data() + 100 * peer);
    }
    EXPECT_EQ(program.run(exchange), DPT_DELEGATED);
    Program capturing(rank, /*busy=*/true);
    EXPECT_EQ(capturing.sum_ones(kMiB), DPT_DELEGATED);
    EXPECT_EQ(program.sum_ones(kMiB), DPT_COMPLETED);
    program.check_sum();
  });
}

// Bytes take long here, not kernels, so one in a list is what it is alone.
TEST_F(CpuReduce, OfAListTheDelegatesAreOnePiece) {
  const TuningClass group{2, false, 1, "a fake GPU, 132 SMs, without peer access"};
  for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
    const double stock_us = range_of(bucket).nominal > kMiB ? 1 : 100;
    const Entry entry = {summarize({AlgorithmName::kCpuReduce, 64 << 10, 3, 1}, {10}),
                         summarize({AlgorithmName::kDelegate}, {stock_us})};
    Decisions::instance().add_measured(group, DPT_ALL_REDUCE, bucket, entry);
  }
  run_ranks(2,
            [](Rank& rank) {
              Program program(rank);
              const auto list = [&] {
                std::vector<Request> each;
                for (const size_t count : {kMiB, kMiB / 4, kMiB}) {
                  each.emplace_back(DPT_ALL_REDUCE, DPT_FLOAT32, count);
                  each.back().reduce_op(DPT_SUM).request.on_device = 1;
                  each.back().request.device = rank.rank();
                }
                return each;
              };
              EXPECT_EQ(program.sum_ones(kMiB), DPT_COMPLETED);
              program.check_sum();
              EXPECT_THAT(rank.begin_coalesced(list()), IsEmpty());
              EXPECT_EQ(program.sum_ones(4 * kMiB), DPT_DELEGATED);
              EXPECT_THAT(rank.begin_coalesced(list()), ElementsAre(0, 2));
            },
            {.tune = DPT_TUNE_AUTO, .execute = stock(1)});
}

TEST_F(CpuReduce, IsChosenWhereItIsFaster) {
  run_ranks(2,
            [](Rank& rank) {
              Program program(rank);
              EXPECT_EQ(program.sum_ones(kMiB), DPT_COMPLETED);
              program.check_sum();
              EXPECT_EQ(program.sum_ones(4096), DPT_DELEGATED);  // too small to be measured
            },
            {.tune = DPT_TUNE_AUTO, .execute = stock(11)});
  const std::vector<DecisionRow> rows = Decisions::instance().rows();
  ASSERT_EQ(rows.size(), 1);
  EXPECT_THAT(std::string(rows[0].group.device), EndsWith("without peer access"));
  EXPECT_EQ(rows[0].decision.chosen->algorithm, AlgorithmName::kCpuReduce);
  EXPECT_GT(rows[0].decision.chosen->chunk_bytes, 0);
  EXPECT_THAT(rows[0].decision.reason, HasSubstr("3 slots of "));
}

// Also in the next job, by the profile: nothing is measured for them.
TEST_F(CpuReduce, TheLargestGoByWhatWasMeasuredWithSmallerOnes) {
  const TuningClass group{2, false, 1, "a fake GPU, 132 SMs, without peer access"};
  const int large = *bucket_of(DPT_ALL_REDUCE, 128 * kMiB, group);
  const Entry entry = {summarize({AlgorithmName::kCpuReduce, 1 << 20, 3, 1}, {10}),
                       summarize({AlgorithmName::kDelegate}, {100})};
  ASSERT_NE(tried_for(large), large);
  Decisions::instance().add_measured(group, DPT_ALL_REDUCE, tried_for(large), entry);
  run_ranks(2,
            [](Rank& rank) {
              Program program(rank);
              EXPECT_EQ(program.sum_ones(128 * kMiB), DPT_COMPLETED);
              program.check_sum();
            },
            {.tune = DPT_TUNE_AUTO, .execute = stock(1)});
  const std::vector<DecisionRow> rows = Decisions::instance().rows();
  ASSERT_EQ(rows.size(), 1);
  EXPECT_EQ(rows[0].decision.source, "measured in this run");
  EXPECT_EQ(rows[0].decision.chosen->algorithm, AlgorithmName::kCpuReduce);
}

TEST_F(CpuReduce, TheDelegateStaysWhereItIsNot) {
  const auto delegated = [](Rank& rank) {
    Program program(rank);
    EXPECT_EQ(program.sum_ones(kMiB), DPT_DELEGATED);
  };
  run_ranks(2, delegated, {.tune = DPT_TUNE_AUTO, .execute = stock(0)});
  Decisions::instance().reset();
  run_ranks(2, delegated, {.tune = DPT_TUNE_OFF, .execute = stock(11)});
}

// If a rank lacks what it takes, all of them go without.
TEST_F(CpuReduce, OneRankThatCannotMapTheMemory) {
  fake_devices().unmappable_rank = 1;
  run_ranks(2, [](Rank& rank) {
    Program program(rank);
    EXPECT_EQ(program.sum_ones(kMiB), DPT_DELEGATED);
  });
  EXPECT_THAT(reason_of(AlgorithmName::kDelegate),
              HasSubstr("rank 1: this fake driver maps nothing"));
}

// ---- Groups that span nodes ----

class CpuReduceNodes : public CpuReduce {
 protected:
  CpuReduceNodes() { Fabric::instance().emulate_nodes({"a", "b"}); }
  ~CpuReduceNodes() override { Fabric::instance().emulate_nodes({}); }
};

TEST_F(CpuReduceNodes, ServeThreeCollectives) {
  run_ranks(4, [](Rank& rank) {
    Program program(rank);
    for (const size_t bytes : {4UL, 100004UL, 9 * kMiB}) {
      EXPECT_EQ(program.sum_ones(bytes), DPT_COMPLETED);
      program.check_sum();
    }
    program.gather_and_scatter(DPT_SUM);
    EXPECT_EQ(program.broadcast_from_2(), DPT_DELEGATED);
  });
  EXPECT_THAT(reason_of(AlgorithmName::kCpuReduce), HasSubstr("to the network and back"));
}

TEST_F(CpuReduceNodes, OneGpuOnEach) {
  fake_devices().peer_access = true;  // to nobody
  run_ranks(2, [](Rank& rank) {
    Program program(rank);
    EXPECT_EQ(program.sum_ones(3 * kMiB), DPT_COMPLETED);
    program.check_sum();
  });
}

TEST_F(CpuReduceNodes, GpusThatReachEachOtherAreTheDelegates) {
  fake_devices().peer_access = true;
  run_ranks(4, [](Rank& rank) {
    Program program(rank);
    EXPECT_EQ(program.sum_ones(kMiB), DPT_DELEGATED);
    EXPECT_EQ(rank.delegate().node_of, std::vector<int>{});
    EXPECT_EQ(program.sum_ones(4 * kMiB), DPT_DELEGATED);
    EXPECT_EQ(rank.delegate().node_of, (std::vector{0, 1, 0, 1}));
  });
}

TEST_F(CpuReduceNodes, AreChosenWhereTheyAreFaster) {
  std::atomic<int> in_stages = 0;
  const auto stock_of = [&](double time_us) {
    return [&in_stages, time_us](const dpt_request& request) {
      in_stages += request.node_of != nullptr ? 1 : 0;
      advance_device(time_us);
      return DPT_OK;
    };
  };
  fake_devices().free_bytes = 64 * kMiB;
  fake_devices().staged_us = 600;
  // All but the largest all_reduce is known: one that is measured takes seconds.
  const auto know = [](double staged_us) {
    const Candidate staged{AlgorithmName::kCpuReduce, 64 << 10, 3, 1};
    const Entry entry = {summarize(staged, {staged_us}),
                         summarize({AlgorithmName::kDelegate}, {1000})};
    const TuningClass group{4, false, 2, "a fake GPU, 132 SMs, without peer access"};
    Decisions::instance().reset();
    for (const Collective each : {DPT_ALL_REDUCE, DPT_ALL_GATHER, DPT_REDUCE_SCATTER}) {
      const int known = each == DPT_ALL_REDUCE ? 4 : kNumBuckets;
      for (int bucket = 0; bucket < known; ++bucket) {
        Decisions::instance().add_measured(group, each, bucket, entry);
      }
    }
  };
  know(600);
  run_ranks(4,
            [](Rank& rank) {
              Program program(rank);
              for (const size_t size : {kMiB, 20 * kMiB}) {
                EXPECT_EQ(program.sum_ones(size), DPT_COMPLETED);
                program.check_sum();
              }
              EXPECT_EQ(program.sum_ones(4096), DPT_DELEGATED);  // too small to be measured
            },
            {.tune = DPT_TUNE_FORCE, .execute = stock_of(1000)});
  EXPECT_EQ(in_stages, 0);  // it competes as it is
  for (const DecisionRow& row : Decisions::instance().rows()) {
    EXPECT_EQ(row.group.nodes, 2);
    EXPECT_EQ(row.decision.chosen->algorithm, AlgorithmName::kCpuReduce)
        << name_of(row.collective) << ": " << row.decision.source << ", "
        << row.decision.times.size();
  }
  know(2000);
  run_ranks(4,
            [](Rank& rank) {
              Program program(rank);
              EXPECT_EQ(program.sum_ones(kMiB), DPT_DELEGATED);
              EXPECT_EQ(rank.delegate().node_of, std::vector<int>{});
              EXPECT_EQ(program.sum_ones(8 * kMiB), DPT_DELEGATED);
              EXPECT_EQ(rank.delegate().node_of, std::vector<int>{});
            },
            {.tune = DPT_TUNE_FORCE, .execute = stock_of(500)});
}

TEST_F(CpuReduceNodes, ARankOfAnotherNodeThatDoesNotComeIsNamed) {
  std::barrier all(4);
  run_ranks(4,
            [&](Rank& rank) {
              Program program(rank);
              EXPECT_EQ(program.sum_ones(kMiB), DPT_COMPLETED);
              program.check_sum();
              all.arrive_and_wait();
              if (rank.rank() != 3) {
                EXPECT_EQ(program.sum_ones(kMiB, 300), DPT_COMPLETED);
                program.lane().synchronize();
                const Failure failure = failure_of([&] { program.sum_ones(kMiB); });
                EXPECT_THAT(failure.what(), HasSubstr("rank 3 did not come in time"));
              }
              all.arrive_and_wait();
            },
            {.raise_errors = true});
}

TEST_F(CpuReduceNodes, ARankThatLeavesIsTold) {
  std::barrier all(2);
  run_ranks(2,
            [&](Rank& rank) {
              Program program(rank);
              EXPECT_EQ(program.sum_ones(kMiB), DPT_COMPLETED);
              program.check_sum();
              all.arrive_and_wait();
              if (rank.rank() == 1) return rank.destroy();
              EXPECT_EQ(program.sum_ones(kMiB), DPT_COMPLETED);
              program.lane().synchronize();
              const Failure failure = failure_of([&] { program.sum_ones(kMiB); });
              EXPECT_THAT(failure.what(), HasSubstr("rank 1"));
            },
            {.raise_errors = true});
}

TEST_F(CpuReduce, MemoryIsGivenBack) {
  const auto count_mappings = [] {
    std::ifstream maps("/proc/self/maps");
    int found = 0;
    for (std::string line; std::getline(maps, line);) found += line.find("deepytorch") != line.npos;
    return found;
  };
  std::atomic<int> in_use = 0;
  const auto use = [&](Rank& rank) {
    Program program(rank);
    program.sum_ones(kMiB);
    program.check_sum();
    rank.barrier();
    in_use = count_mappings();
    rank.barrier();
  };
  run_ranks(2, use);
  const int before = count_mappings();
  run_ranks(2, use);
  EXPECT_GT(in_use, before);
  EXPECT_EQ(count_mappings(), before);
}

TEST_F(CpuReduce, ARankThatDoesNotComeIsRaisedByTheNextCall) {
  std::barrier both(2);
  run_ranks(2,
            [&](Rank& rank) {
              Program program(rank);
              EXPECT_EQ(program.sum_ones(kMiB), DPT_COMPLETED);
              program.check_sum();
              both.arrive_and_wait();
              if (rank.rank() == 0) {
                EXPECT_EQ(program.sum_ones(kMiB, 200), DPT_COMPLETED);
                program.lane().synchronize();
                const Failure failure = failure_of([&] { program.sum_ones(kMiB); });
                EXPECT_THAT(failure.what(), HasSubstr("rank 1 did not come in time"));
              }
              both.arrive_and_wait();
              EXPECT_EQ(failure_of([&] { program.sum_ones(kMiB); }).status, DPT_ERR_ABORTED);
            },
            {.raise_errors = true});
  EXPECT_EQ(ends_, 0);
}

TEST_F(CpuReduce, OperationsOfDifferentSizesEndTheProcess) {
  run_ranks(2, [&](Rank& rank) {
    Program program(rank);
    EXPECT_EQ(program.sum_ones(kMiB + 4 * rank.rank()), DPT_COMPLETED);
    program.lane().synchronize();
  });
  EXPECT_EQ(ends_, 2);
}

TEST_F(CpuReduce, WhoEndsAGroupHimselfGoesOn) {
  std::barrier both(2);
  run_ranks(2, [&](Rank& rank) {
    Program program(rank);
    program.sum_ones(kMiB);
    program.check_sum();
    both.arrive_and_wait();
    if (rank.rank() == 0) {
      program.sum_ones(kMiB);  // the other one doesn't come
      rank.abort("for the test");
    }
    both.arrive_and_wait();
    rank.abort("for the test");
    program.lane().synchronize();
  });
  EXPECT_EQ(ends_, 0);
}

}  // namespace
}  // namespace dpt::testing
