// Staged groups on one board, with devices that are threads (fake_copy_engine.hpp): every
// operation, many under way, and what follows when something goes wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "elements.hpp"
#include "host/reduce.hpp"
#include "staged_ranks.hpp"

namespace dpt::testing {
namespace {

using namespace std::chrono_literals;
using staged::Board;
using staged::Cut;
using staged::Job;
using staged::Pipeline;
using staged::Shape;
using staged::Workers;
using StagedFailure = Pipeline::Failure;

constexpr Collective kCollectives[] = {
    DPT_ALL_REDUCE, DPT_REDUCE_SCATTER, DPT_ALL_GATHER, DPT_BROADCAST};

class StagedSizes : public ::testing::TestWithParam<int> {};

TEST_P(StagedSizes, EveryCollectiveOfOddSizes) {
  auto all = processes(GetParam());
  StagedRanks ranks(all, {.delay_us = 0});
  int salt = 0;
  for (const Collective collective : kCollectives) {
    for (const size_t count : {1, 63, 1025, 9001}) {
      for (const size_t chunk : {size_t{512}, size_t{0}}) {
        const ReduceOp op = is_reduction(collective) ? DPT_SUM : DPT_NO_REDUCE;
        Operation operation(collective, DPT_FLOAT32, op, count, ranks.size(), ++salt);
        run(ranks, all, operation, {chunk, salt % 3});
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, StagedSizes, ::testing::Values(2, 3, 5, 8));

TEST(Staged, EveryTypeAndReduction) {
  auto all = processes(3);
  StagedRanks ranks(all, {.delay_us = 0});
  for (int type = DPT_BOOL; type <= DPT_FLOAT64; ++type) {
    for (int op = DPT_SUM; op <= DPT_BXOR; ++op) {
      const auto dtype = static_cast<DataType>(type);
      const auto reduce_op = static_cast<ReduceOp>(op);
      if (!can_reduce(dtype, reduce_op)) {
        EXPECT_NE(Job::why_not({DPT_ALL_REDUCE, dtype, reduce_op}), "");
        continue;
      }
      EXPECT_EQ(Job::why_not({DPT_ALL_REDUCE, dtype, reduce_op}), "");
      for (const Collective collective : {DPT_ALL_REDUCE, DPT_REDUCE_SCATTER}) {
        Operation operation(collective, dtype, reduce_op, 701, 3, op);
        run(ranks, all, operation, {1024, op % 3});
      }
    }
  }
}

// Some devices' lanes are carried out one after the other.
TEST(Staged, LanesThatShareAQueue) {
  for (const int depth : {2, 3}) {
    auto all = processes(3);
    StagedRanks ranks(all, {.depth = depth, .delay_us = 0, .one_queue = true});
    for (const Collective collective : kCollectives) {
      for (const size_t count : {10, 300, 9001}) {
        const ReduceOp op = is_reduction(collective) ? DPT_SUM : DPT_NO_REDUCE;
        for (const int threads : {0, 2}) {
          Operation operation(collective, DPT_FLOAT32, op, count, 3);
          run(ranks, all, operation, {512, threads});
        }
      }
    }
  }
}

// Devices that reach each other's memory: peers fetch from there, and the host has words alone.
TEST(Staged, SlotsOnDevices) {
  for (const int size : {2, 5}) {
    auto all = processes(size, 1);
    StagedRanks ranks(all, {.threads = 1, .slow_rank = 1, .on_devices = true});
    std::vector<std::unique_ptr<Operation>> operations;
    for (const size_t count : {1, 63, 1025, 9001}) {
      for (const Collective collective : {DPT_ALL_GATHER, DPT_BROADCAST}) {
        operations.push_back(std::make_unique<Operation>(
            collective, DPT_BFLOAT16, DPT_NO_REDUCE, count, size, static_cast<int>(count)));
        for (int rank = 0; rank < size; ++rank) {
          ranks.enqueue(rank, operations.back()->request(rank), {count % 2048, 0});
        }
      }
    }
    for (int rank = 0; rank < size; ++rank) {
      all[rank]->stream.synchronize();
      for (const auto& operation : operations) operation->check(rank);
    }
  }
}

// One command copies parts of one tensor. Where each has an allocation of its own, which may lie
// just as far from the next, a device would refuse that.
TEST(Staged, PartsOfOneTensorAndTensorsOfTheirOwn) {
  constexpr int kRanks = 3;
  constexpr size_t kCount = 900;
  constexpr size_t kPart = kCount * sizeof(float);
  for (const int threads : {0, 2}) {
    int copies[2] = {};
    for (const bool apart : {false, true}) {
      std::vector<char> memory(kRanks * kRanks * kPart);
      StagedOptions options{.before_copy_of_rank_0 = [&] { ++copies[apart ? 1 : 0]; }};
      const size_t allocation = apart ? kPart : kRanks * kPart;
      for (size_t first = 0; first < memory.size(); first += allocation) {
        options.allocations.emplace_back(memory.data() + first, allocation);
      }
      auto all = processes(kRanks);
      StagedRanks ranks(all, options);
      Operation operation(DPT_REDUCE_SCATTER, DPT_FLOAT32, DPT_SUM, kCount, kRanks);
      std::vector<const void*> parts[kRanks];
      for (int rank = 0; rank < kRanks; ++rank) {
        dpt_request request = operation.request(rank);
        for (int part = 0; part < kRanks; ++part) {
          char* const place = memory.data() + (rank * kRanks + part) * kPart;
          std::memcpy(place, request.inputs[part], kPart);
          parts[rank].push_back(place);
        }
        request.inputs = parts[rank].data();
        ranks.enqueue(rank, request, {512, threads});
      }
      for (int rank = 0; rank < kRanks; ++rank) {
        all[rank]->stream.synchronize();
        operation.check(rank);
      }
    }
    EXPECT_LT(copies[0], copies[1]) << threads;
  }
}

TEST(Staged, EmptyTensors) {
  auto all = processes(2);
  StagedRanks ranks(all);
  for (const Collective collective : kCollectives) {
    const ReduceOp op = is_reduction(collective) ? DPT_SUM : DPT_NO_REDUCE;
    Operation operation(collective, DPT_FLOAT32, op, 0, 2);
    run(ranks, all, operation, {0, 1});
    run(ranks, all, operation, {0, 0});
  }
}

TEST(Staged, InPlace) {
  struct Case {
    Collective collective;
    int size, threads;
  };
  for (const Case& each : {Case{DPT_ALL_REDUCE, 3, 2},
                           Case{DPT_ALL_REDUCE, 2, 0},
                           Case{DPT_ALL_REDUCE, 3, 0},
                           Case{DPT_REDUCE_SCATTER, 3, 2},
                           Case{DPT_REDUCE_SCATTER, 3, 0}}) {
    auto all = processes(each.size);
    StagedRanks ranks(all, {.slow_rank = 1});
    Operation operation(each.collective, DPT_BFLOAT16, DPT_SUM, 5003, each.size);
    for (int rank = 0; rank < each.size; ++rank) {
      ranks.enqueue(rank, operation.in_place(rank), {512, each.threads});
    }
    for (int rank = 0; rank < each.size; ++rank) {
      all[rank]->stream.synchronize();
      operation.check(rank);
    }
  }
}

// Devices add up some reductions themselves: in rank order and rounded once, as workers do it.
TEST(Staged, DevicesAddUp) {
  EXPECT_TRUE(Job::adds_on_device(DPT_ALL_REDUCE, DPT_BFLOAT16, DPT_SUM));
  EXPECT_TRUE(Job::adds_on_device(DPT_REDUCE_SCATTER, DPT_FLOAT16, DPT_AVG));
  EXPECT_FALSE(Job::adds_on_device(DPT_REDUCE_SCATTER, DPT_BFLOAT16, DPT_MAX));
  EXPECT_FALSE(Job::adds_on_device(DPT_REDUCE_SCATTER, DPT_FLOAT64, DPT_SUM));
  EXPECT_FALSE(Job::adds_on_device(DPT_ALL_GATHER, DPT_FLOAT32, DPT_NO_REDUCE));
  auto all = processes(4);
  Operation operation(DPT_REDUCE_SCATTER, DPT_FLOAT32, DPT_SUM, 5000, 4);
  const Shape shape{4, kStagedSlot, 3, 2};
  const std::vector<Job> jobs =
      Job::of(operation.request(1), {0, 0}, {NodeLayout::one_node(4), 1}, shape);
  ASSERT_EQ(jobs.size(), 1U);
  const Job& job = jobs[0];
  EXPECT_EQ(job.kind, Job::Kind::kReduceOnDevice);
  EXPECT_EQ(job.pieces.size(), 3U);  // its own is not copied
  EXPECT_EQ(job.threads, 0);
  // A rank's slot is without its own part: that for rank 1 is the first of rank 0's.
  EXPECT_EQ(job.downloads[0].piece, 0U);
  EXPECT_EQ(job.downloads[1].piece, 1U);
}

TEST(Staged, AnAllReduceThatDevicesAddUpIsAReduceScatterAndAnAllGather) {
  auto all = processes(3);
  const staged::Membership ranks{NodeLayout::one_node(3), 2};
  const Shape shape{3, kStagedSlot, 3, 2};
  const auto kinds = [&](size_t count, ReduceOp op, int threads) {
    Operation operation(DPT_ALL_REDUCE, DPT_FLOAT32, op, count, 3);
    std::vector<Job::Kind> found;
    for (const Job& job : Job::of(operation.request(2), {0, threads}, ranks, shape)) {
      found.push_back(job.kind);
    }
    return found;
  };
  using Kind = Job::Kind;
  using Kinds = std::vector<Kind>;
  EXPECT_EQ(kinds(6000, DPT_SUM, 0), (Kinds{Kind::kReduceOnDevice, Kind::kExchange}));
  // The part that can't be divided comes first.
  EXPECT_EQ(kinds(6001, DPT_AVG, 0),
            (Kinds{Kind::kReduce, Kind::kReduceOnDevice, Kind::kExchange}));
  for (const size_t count : {0, 1, 2}) EXPECT_EQ(kinds(count, DPT_SUM, 0), Kinds{Kind::kReduce});
  EXPECT_EQ(kinds(6000, DPT_MAX, 0), Kinds{Kind::kReduce});
  EXPECT_EQ(kinds(6000, DPT_SUM, 2), Kinds{Kind::kReduce});

  // Nobody in another operation takes a part for it.
  Operation whole(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 6001, 3);
  const std::vector<Job> parts = Job::of(whole.request(2), {0, 0}, ranks, shape);
  Operation rest(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 1, 3);
  Operation scatter(DPT_REDUCE_SCATTER, DPT_FLOAT32, DPT_SUM, 2000, 3);
  Operation gather(DPT_ALL_GATHER, DPT_FLOAT32, DPT_NO_REDUCE, 2000, 3);
  const auto description = [&](Operation& operation) {
    return Job::of(operation.request(2), {0, 0}, ranks, shape)[0].description;
  };
  EXPECT_NE(parts[0].description, description(rest));
  EXPECT_NE(parts[1].description, description(scatter));
  EXPECT_NE(parts[2].description, description(gather));
  EXPECT_NE(parts[1].description, parts[2].description);
}

// One after the other without a pause, of all kinds, with devices and ranks of different speeds,
// and with numbers that go round meanwhile.
TEST(Staged, ManyUnderWay) {
  for (const int depth : {2, 3}) {
    auto all = processes(4);
    const uint64_t near_the_end = (uint64_t{1} << 32) - 100;
    StagedRanks ranks(all, {.depth = depth, .first_chunk = near_the_end, .slow_rank = depth});
    std::vector<std::unique_ptr<Operation>> operations;
    for (int i = 0; i < 24; ++i) {
      const Collective collective = kCollectives[i * 7 % 4];
      const ReduceOp op = is_reduction(collective) ? DPT_SUM : DPT_NO_REDUCE;
      operations.push_back(
          std::make_unique<Operation>(collective, DPT_FLOAT32, op, 100 + 211 * i, 4, i));
      for (int rank = 0; rank < 4; ++rank) {
        ranks.enqueue(rank, operations.back()->request(rank), {1024, i % 3});
      }
    }
    for (int rank = 0; rank < 4; ++rank) {
      all[rank]->stream.synchronize();
      for (const auto& operation : operations) operation->check(rank);
    }
  }
}

// Several groups of the same processes, each on a stream of its own, started in different orders.
TEST(Staged, GroupsInOppositeOrders) {
  constexpr int kGroups = 3;
  auto all = processes(3, 1);
  std::vector<std::unique_ptr<StagedRanks>> groups;
  std::vector<std::unique_ptr<FakeLane>> streams;
  for (int group = 0; group < kGroups; ++group) {
    groups.push_back(std::make_unique<StagedRanks>(all, StagedOptions{.threads = 1}));
  }
  for (int turn = 0; turn < 4; ++turn) {
    std::vector<std::unique_ptr<Operation>> operations;
    for (int group = 0; group < kGroups; ++group) {
      operations.push_back(
          std::make_unique<Operation>(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 3001, 3, group));
    }
    streams.clear();
    for (int i = 0; i < 3 * kGroups; ++i) streams.push_back(std::make_unique<FakeLane>(i, 10));
    for (int rank = 0; rank < 3; ++rank) {
      for (int i = 0; i < kGroups; ++i) {
        const int group = rank % 2 == 0 ? i : kGroups - 1 - i;
        const dpt_request request = operations[group]->request(rank);
        (*groups[group])[rank].enqueue(
            groups[group]->job(rank, request, {512, 1}), 60s, streams[group * 3 + rank].get());
      }
    }
    for (int group = 0; group < kGroups; ++group) {
      for (int rank = 0; rank < 3; ++rank) {
        streams[group * 3 + rank]->synchronize();
        operations[group]->check(rank);
      }
    }
  }
}

// The driver of a device may have fewer queues than groups have lanes. What waits at the head of
// one holds up all behind it, which is safe as long as ranks start operations in the same order.
TEST(Staged, GroupsThatShareQueues) {
  constexpr int kGroups = 3;
  for (const auto& [queues, size] : {std::pair{1, 2}, {5, 2}, {8, 2}, {1, 3}, {5, 3}}) {
    auto all = processes(size, 1);
    for (auto& each : all) each->queues = std::make_unique<FakeQueues>(queues, 3);
    std::vector<std::unique_ptr<StagedRanks>> groups;
    for (int group = 0; group < kGroups; ++group) {
      groups.push_back(std::make_unique<StagedRanks>(all, StagedOptions{.threads = 1}));
    }
    std::vector<std::unique_ptr<Operation>> operations;
    std::vector<std::unique_ptr<FakeLane>> streams;
    for (int i = 0; i < 4 * kGroups; ++i) {
      const Collective collective = kCollectives[i * 3 % 4];
      const ReduceOp op = is_reduction(collective) ? DPT_SUM : DPT_NO_REDUCE;
      operations.push_back(
          std::make_unique<Operation>(collective, DPT_FLOAT32, op, 3001 + i, size, i));
      for (int rank = 0; rank < size; ++rank) {
        streams.push_back(std::make_unique<FakeLane>(i, 10));
        const std::vector<Job> job =
            groups[i % kGroups]->job(rank, operations[i]->request(rank), {512, i % 2});
        (*groups[i % kGroups])[rank].enqueue(job, 60s, streams.back().get());
      }
    }
    for (auto& stream : streams) stream->synchronize();
    for (int rank = 0; rank < size; ++rank) {
      for (const auto& operation : operations) operation->check(rank);
    }
  }
}

// ---- When something goes wrong ----

std::optional<StagedFailure> wait_for_failure(const Pipeline& pipeline) {
  const auto limit = std::chrono::steady_clock::now() + 20s;
  std::optional<StagedFailure> failure;  // asked once: the operation may end just as it is told
  while (!(failure = pipeline.failure()) && std::chrono::steady_clock::now() < limit) {
    if (pipeline.is_done()) return std::nullopt;
    std::this_thread::sleep_for(1ms);
  }
  return failure;
}

// A failed operation's results stay unseen until the process says so; then everything ends.
void expect_held_and_released(StagedRanks& ranks,
                              std::vector<std::unique_ptr<Process>>& all,
                              int rank) {
  FakeLane& stream = all[rank]->stream;
  std::this_thread::sleep_for(10ms);
  EXPECT_FALSE(stream.is_idle());
  ranks[rank].release();
  stream.synchronize();
}

class ByWorkersOrDevices : public ::testing::TestWithParam<int> {};  // threads
INSTANTIATE_TEST_SUITE_P(StagedFailure, ByWorkersOrDevices, ::testing::Values(2, 0));

TEST_P(ByWorkersOrDevices, ARankThatDoesNotComeIsNamed) {
  const int threads = GetParam();
  auto all = processes(3);
  StagedRanks ranks(all);
  for (const Collective collective : {DPT_ALL_REDUCE, DPT_BROADCAST}) {
    const ReduceOp op = is_reduction(collective) ? DPT_SUM : DPT_NO_REDUCE;
    Operation operation(collective, DPT_FLOAT32, op, 5000, 3);
    run(ranks, all, operation, {512, threads});
  }
  Operation operation(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 5000, 3);
  for (const int rank : {0, 2}) ranks.enqueue(rank, operation.request(rank), {512, threads}, 1s);
  for (const int rank : {0, 2}) {
    const auto failure = wait_for_failure(ranks[rank]);
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->kind, StagedFailure::kTimeout);
    EXPECT_EQ(failure->peer, 1);
    EXPECT_EQ(failure->sequence, 3U);
    expect_held_and_released(ranks, all, rank);
  }
  // The late one has nothing that failed, and can start nothing.
  EXPECT_FALSE(ranks[1].failure().has_value());
  EXPECT_THROW(ranks.enqueue(1, operation.request(1), {512, 2}), Error);
  EXPECT_TRUE(all[1]->stream.is_idle());
}

TEST(StagedFailure, DifferentOperationsAreNoticed) {
  const auto start = [](StagedRanks& ranks, int rank, Collective collective, size_t count) {
    const ReduceOp op = is_reduction(collective) ? DPT_SUM : DPT_NO_REDUCE;
    auto operation = std::make_unique<Operation>(collective, DPT_FLOAT32, op, count, 2);
    ranks.enqueue(rank, operation->request(rank), {512, count % 3 == 0 ? 1 : 0});
    return operation;
  };
  struct Case {
    Collective first, second;
    size_t first_count, second_count;
  };
  for (const Case& each : {Case{DPT_ALL_REDUCE, DPT_ALL_REDUCE, 100, 3000},
                           Case{DPT_ALL_REDUCE, DPT_BROADCAST, 3000, 3000},
                           Case{DPT_BROADCAST, DPT_BROADCAST, 3000, 10},
                           Case{DPT_REDUCE_SCATTER, DPT_REDUCE_SCATTER, 3000, 10}}) {
    auto all = processes(2);
    StagedRanks ranks(all);
    const auto first = start(ranks, 0, each.first, each.first_count);
    const auto second = start(ranks, 1, each.second, each.second_count);
    for (int rank = 0; rank < 2; ++rank) {
      const auto failure = wait_for_failure(ranks[rank]);
      ASSERT_TRUE(failure.has_value());
      EXPECT_EQ(failure->kind, StagedFailure::kMismatch);
      expect_held_and_released(ranks, all, rank);
    }
    // The output of rank 0 may have a copy of its own input.
    EXPECT_TRUE(each.first != DPT_ALL_REDUCE || first->is_untouched(0));
    EXPECT_TRUE(second->is_untouched(1));
  }
}

// With one rank that is far behind, wherever the others are.
TEST_P(ByWorkersOrDevices, AbortedInTheMiddle) {
  const int threads = GetParam();
  for (const Collective collective : kCollectives) {
    for (const auto delay : {0ms, 3ms, 9ms}) {
      auto all = processes(3);
      StagedRanks ranks(all, {.slow_rank = 1});
      const ReduceOp op = is_reduction(collective) ? DPT_SUM : DPT_NO_REDUCE;
      std::vector<std::unique_ptr<Operation>> operations;
      for (int i = 0; i < 3; ++i) {
        operations.push_back(std::make_unique<Operation>(collective, DPT_FLOAT32, op, 3000, 3, i));
        for (int rank = 0; rank < (i == 2 ? 2 : 3); ++rank) {
          ranks.enqueue(rank, operations.back()->request(rank), {512, threads});
        }
      }
      std::this_thread::sleep_for(delay);
      ranks[2].break_off(StagedFailure::kAborted, 2);
      for (int rank = 0; rank < 3; ++rank) {
        if (ranks[rank].is_done()) continue;
        const auto failure = wait_for_failure(ranks[rank]);
        if (!failure && ranks[rank].is_done()) continue;
        ASSERT_TRUE(failure.has_value());
        EXPECT_EQ(failure->kind, StagedFailure::kAborted);
        expect_held_and_released(ranks, all, rank);
      }
      EXPECT_FALSE(ranks[0].failure().has_value());  // it was told, and nothing is under way
      EXPECT_THROW(ranks.enqueue(0, operations[0]->request(0), {512, 2}), Error);
    }
  }
}

TEST(StagedFailure, WhatEndedBeforeKeepsItsResults) {
  auto all = processes(2);
  StagedRanks ranks(all);
  Operation operation(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 5000, 2);
  run(ranks, all, operation, {512, 2});
  ranks[0].break_off(StagedFailure::kAborted, 0);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_FALSE(ranks[rank].failure().has_value());
    EXPECT_TRUE(ranks[rank].is_done());
    operation.check(rank);
  }
}

TEST_P(ByWorkersOrDevices, AnEngineThatFailsBreaksTheGroup) {
  const int threads = GetParam();
  for (const int last : {0, 6, 50, 90}) {  // by devices, in each part
    auto all = processes(3);
    int copies = 0;
    StagedRanks ranks(all, {.before_copy_of_rank_0 = [&] {
                        if (copies++ == last) throw Error(DPT_ERR_SYSTEM, "a fake driver's error");
                      }});
    Operation operation(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 7000, 3);
    for (const int rank : {1, 2}) ranks.enqueue(rank, operation.request(rank), {512, threads});
    EXPECT_THROW(ranks.enqueue(0, operation.request(0), {512, threads}), Error) << copies;
    for (const int rank : {1, 2}) {
      const auto failure = wait_for_failure(ranks[rank]);
      ASSERT_TRUE(failure.has_value());
      EXPECT_EQ(failure->kind, StagedFailure::kAborted);
      EXPECT_EQ(failure->peer, 0);
      EXPECT_EQ(failure->sequence, 1U);
    }
    for (int rank = 0; rank < 3; ++rank) expect_held_and_released(ranks, all, rank);
  }
}

// In either part of an all_reduce. The others get no further soon, since they need its slots, and
// it finds that itself is the one.
class ARankThatStops : public ::testing::TestWithParam<double> {};  // after how much
INSTANTIATE_TEST_SUITE_P(StagedFailure, ARankThatStops, ::testing::Values(0.3, 0.95));

TEST_P(ARankThatStops, InTheMiddleIsNamed) {
  auto all = processes(3);
  std::promise<void> stopped;
  std::shared_future<void> goes_on = stopped.get_future().share();
  int copies = 0;
  int last = -1;
  StagedRanks ranks(all, {.before_copy_of_rank_0 = [&] {
                      if (copies++ == last) goes_on.wait();
                    }});
  Operation operation(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 6000, 3);
  run(ranks, all, operation, {512, 0});
  last = copies + static_cast<int>(GetParam() * copies);
  std::thread first([&] {
    try {
      ranks.enqueue(0, operation.request(0), {512, 0}, 1s);
    } catch (const Error&) {  // it may find the group broken
    }
  });
  for (const int rank : {1, 2}) ranks.enqueue(rank, operation.request(rank), {512, 0}, 1s);
  for (const int rank : {1, 2}) {
    const auto failure = wait_for_failure(ranks[rank]);
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->kind, StagedFailure::kTimeout);
    EXPECT_EQ(failure->peer, 0);
  }
  stopped.set_value();
  first.join();
  for (int rank = 0; rank < 3; ++rank) expect_held_and_released(ranks, all, rank);
}

}  // namespace
}  // namespace dpt::testing
