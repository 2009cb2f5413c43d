// Staged groups that span nodes: every operation on one board for each, with sockets in between,
// and what follows when a partner is elsewhere.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "host/reduce.hpp"
#include "staged_ranks.hpp"

namespace dpt::testing {
namespace {

using namespace std::chrono_literals;
using staged::Job;
using StagedFailure = staged::Pipeline::Failure;
using ::testing::HasSubstr;

constexpr Collective kBetweenNodes[] = {DPT_ALL_REDUCE, DPT_REDUCE_SCATTER, DPT_ALL_GATHER};

// The node of each rank.
class InternodeSenderLayouts : public ::testing::TestWithParam<std::vector<int>> {
 protected:
  int size() const { return static_cast<int>(GetParam().size()); }
};

TEST_P(InternodeSenderLayouts, EveryCollectiveOfOddSizes) {
  auto all = processes(size());
  StagedRanks ranks(all, {.delay_us = 0, .node_of = GetParam()});
  int salt = 0;
  for (const Collective collective : kBetweenNodes) {
    for (const size_t count : {0, 1, 63, 1025, 9001}) {
      for (const size_t chunk : {size_t{1024}, size_t{0}}) {
        const ReduceOp op = is_reduction(collective) ? DPT_SUM : DPT_NO_REDUCE;
        Operation operation(collective, DPT_FLOAT32, op, count, size(), ++salt);
        run(ranks, all, operation, {chunk, salt % 3});
      }
    }
  }
}

TEST_P(InternodeSenderLayouts, ManyAtATime) {
  auto all = processes(size());
  StagedRanks ranks(all, {.slow_rank = 1, .node_of = GetParam()});
  std::vector<std::unique_ptr<Operation>> operations;
  for (int i = 0; i < 24; ++i) {
    const Collective collective = kBetweenNodes[i % 3];
    const ReduceOp op = is_reduction(collective) ? DPT_SUM : DPT_NO_REDUCE;
    operations.push_back(
        std::make_unique<Operation>(collective, DPT_INT32, op, 100 + 777 * i % 5000, size(), i));
  }
  for (int rank = 0; rank < size(); ++rank) {
    for (size_t i = 0; i < operations.size(); ++i) {
      ranks.enqueue(
          rank, operations[i]->request(rank), {512 * (1 + i % 3), static_cast<int>(i % 3)});
    }
  }
  for (int rank = 0; rank < size(); ++rank) {
    all[rank]->stream.synchronize();
    for (const auto& operation : operations) operation->check(rank);
  }
}

INSTANTIATE_TEST_SUITE_P(Nodes,
                         InternodeSenderLayouts,
                         ::testing::Values(std::vector{0, 1},
                                           std::vector{0, 0, 1, 1},
                                           std::vector{0, 1, 0, 1},
                                           std::vector{0, 1, 2},
                                           std::vector{0, 1, 1, 2, 2, 0},
                                           std::vector{0, 0, 0, 0, 1, 1, 1, 1}));

TEST(InternodeSender, EveryTypeAndReduction) {
  auto all = processes(4);
  StagedRanks ranks(all, {.delay_us = 0, .node_of = {0, 0, 1, 1}});
  for (int type = DPT_BOOL; type <= DPT_FLOAT64; ++type) {
    for (int op = DPT_SUM; op <= DPT_BXOR; ++op) {
      const auto dtype = static_cast<DataType>(type);
      const auto reduce_op = static_cast<ReduceOp>(op);
      if (!can_reduce(dtype, reduce_op)) continue;
      for (const Collective collective : {DPT_ALL_REDUCE, DPT_REDUCE_SCATTER}) {
        Operation operation(collective, dtype, reduce_op, 701, 4, op);
        run(ranks, all, operation, {1024, 0});
      }
    }
  }
}

TEST(InternodeSender, InPlaceAndAnyDepth) {
  for (const int depth : {1, 2, 4}) {
    for (const Collective collective : {DPT_ALL_REDUCE, DPT_REDUCE_SCATTER}) {
      auto all = processes(4);
      StagedRanks ranks(all, {.depth = depth, .slow_rank = 2, .node_of = {0, 1, 0, 1}});
      Operation operation(collective, DPT_BFLOAT16, DPT_SUM, 5003, 4);
      for (int rank = 0; rank < 4; ++rank) {
        ranks.enqueue(rank, operation.in_place(rank), {512, 2});
      }
      for (int rank = 0; rank < 4; ++rank) {
        all[rank]->stream.synchronize();
        operation.check(rank);
      }
    }
  }
}

TEST(InternodeSender, NumbersThatGoRound) {
  auto all = processes(4);
  StagedRanks ranks(all, {.first_chunk = (uint64_t{1} << 32) - 20, .node_of = {0, 0, 1, 1}});
  for (const Collective collective : kBetweenNodes) {
    const ReduceOp op = is_reduction(collective) ? DPT_SUM : DPT_NO_REDUCE;
    Operation operation(collective, DPT_FLOAT32, op, 5000, 4);
    run(ranks, all, operation, {512, 1});
  }
}

TEST(InternodeSender, BroadcastIsNotServed) {
  EXPECT_THAT(Job::why_not({.collective = DPT_BROADCAST, .dtype = DPT_FLOAT32, .nodes = true}),
              HasSubstr("no broadcast between nodes"));
}

// ---- When something goes wrong ----

void expect_failure(StagedRanks& ranks,
                    int rank,
                    StagedFailure::Kind kind,
                    const ::testing::Matcher<int>& peer) {
  for (int i = 0; i < 10000 && !ranks[rank].failure(); ++i) std::this_thread::sleep_for(1ms);
  const auto failure = ranks[rank].failure();
  ASSERT_TRUE(failure.has_value()) << "rank " << rank;
  EXPECT_EQ(failure->kind, kind) << "rank " << rank;
  EXPECT_THAT(failure->peer, peer) << "rank " << rank;
}

void end(StagedRanks& ranks, std::vector<std::unique_ptr<Process>>& all) {
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (!ranks[rank].is_broken()) ranks[rank].break_off(StagedFailure::kAborted, rank);
    while (!ranks[rank].failure() && !ranks[rank].is_done()) std::this_thread::sleep_for(1ms);
    ranks[rank].release();
  }
  for (auto& each : all) each->stream.synchronize();
}

TEST(InternodeSender, APartnerThatDoesNotComeIsNamed) {
  auto all = processes(4);
  StagedRanks ranks(all, {.node_of = {0, 0, 1, 1}});
  Operation operation(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 5000, 4);
  for (const int rank : {0, 1, 2}) ranks.enqueue(rank, operation.request(rank), {512, 1}, 2s);
  // The own node knows who is late, the other one whose part of it is missing.
  expect_failure(ranks, 2, StagedFailure::kTimeout, 3);
  expect_failure(ranks, 0, StagedFailure::kTimeout, ::testing::AnyOf(2, 3));
  end(ranks, all);
  for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(operation.is_untouched(rank));
}

TEST(InternodeSender, DifferentOperationsOfNodesAreNamed) {
  auto all = processes(2);
  StagedRanks ranks(all, {.node_of = {0, 1}});
  Operation one(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 5000, 2);
  Operation other(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 5001, 2);
  ranks.enqueue(0, one.request(0), {512, 1});
  ranks.enqueue(1, other.request(1), {512, 1});
  expect_failure(ranks, 0, StagedFailure::kMismatch, 1);
  expect_failure(ranks, 1, StagedFailure::kMismatch, 0);
  end(ranks, all);
}

TEST(InternodeSender, APartnerThatLeftIsTold) {
  auto all = processes(2);
  StagedRanks ranks(all, {.node_of = {0, 1}});
  Operation operation(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 50000, 2);
  ranks.enqueue(0, operation.request(0), {512, 1});
  std::this_thread::sleep_for(20ms);
  ranks.leave(1);
  expect_failure(ranks, 0, StagedFailure::kAborted, 0);
  EXPECT_THAT(ranks.links().trouble(), HasSubstr("rank 1"));
  ranks[0].release();
  all[0]->stream.synchronize();
}

}  // namespace
}  // namespace dpt::testing
