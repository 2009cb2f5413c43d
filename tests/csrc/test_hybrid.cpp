// Operations that CPU-Reduce and the stock backend divide among them: both parts' results, when
// that is chosen, and how it ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>

#include "staged_program.hpp"
#include "staged_ranks.hpp"
#include "units.hpp"

namespace dpt::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr int kPart = 40;  // percent

// Ranks meet in this when each has come to it on its stream.
class Meeting {
 public:
  explicit Meeting(int size) : inputs_(size) {}

  // A command of rank `rank`'s stream: sums up what is at all ranks' `values`.
  std::function<bool()> sum(int rank, float* values, size_t count) {
    struct State {
      int step = 0;
      std::vector<float> sum;
    };
    return [this, rank, values, count, state = std::make_shared<State>()] {
      const int size = static_cast<int>(inputs_.size());
      switch (state->step) {
        case 0:
          inputs_[rank] = values;
          ++came_;
          state->step = 1;
          return false;
        case 1:
          if (came_ < size) return false;
          state->sum.assign(count, 0);
          for (const float* input : inputs_) {
            for (size_t i = 0; i < count; ++i) state->sum[i] += input[i];
          }
          ++summed_;
          state->step = 2;
          return false;
        default:
          if (summed_ < size) return false;
          std::copy(state->sum.begin(), state->sum.end(), values);
          return true;
      }
    };
  }

 private:
  std::vector<const float*> inputs_;
  std::atomic<int> came_{0};
  std::atomic<int> summed_{0};
};

// As NCCL on a GPU: every rank's part begins and ends on its stream.
class FakeStock {
 public:
  explicit FakeStock(int size) : calls_(size), size_(size) {}

  dpt_status execute(const dpt_request& request) {
    if (status != DPT_OK) return status;
    const int rank = request.device;
    if (request.dtype == DPT_FLOAT32) {  // the program's, not a trial's
      auto* const lane = static_cast<FakeLane*>(request.stream(request.call));
      auto* const values = static_cast<float*>(request.outputs[0]);
      lane->push([this, meeting = meet(rank).sum(rank, values, request.count)] {
        return is_abandoned() || meeting();
      });
      elements += request.count;
    }
    advance_device(time_us(request.count * size_of(request.dtype)));
    return DPT_OK;
  }

  std::function<double(size_t)> time_us = [](size_t) { return 10.0; };
  std::atomic<dpt_status> status = DPT_OK;
  std::atomic<size_t> elements = 0;  // that all ranks gave it
  std::atomic<const std::atomic<int>*> times_abandoned = nullptr;

 private:
  bool is_abandoned() const { return times_abandoned != nullptr && *times_abandoned > 0; }

  Meeting& meet(int rank) {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<Meeting>& meeting = meetings_[calls_[rank]++];
    if (!meeting) meeting = std::make_unique<Meeting>(size_);
    return *meeting;
  }

  std::mutex mutex_;
  std::vector<int> calls_;
  int size_;
  std::map<int, std::unique_ptr<Meeting>> meetings_;
};

class Hybrid : public CpuReduce {
 protected:
  static RankOptions options(FakeStock& stock, dpt_tune tune = DPT_TUNE_AUTO) {
    return {.tune = tune,
            .execute = [&stock](const dpt_request& request) { return stock.execute(request); }};
  }

  // As if it had been measured: divided it takes half of what either takes alone.
  static void know(int ranks, dpt_collective collective = DPT_ALL_REDUCE) {
    const Candidate whole{AlgorithmName::kCpuReduce, 64 << 10, 3, 1};
    Candidate divided = whole;
    divided.delegated = kPart;
    const Entry entry = {summarize(whole, {20}),
                         summarize(divided, {10}),
                         summarize({AlgorithmName::kDelegate}, {30})};
    const TuningClass group{ranks, false, 1, "a fake GPU, 132 SMs, without peer access"};
    for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
      Decisions::instance().add_measured(group, collective, bucket, entry);
    }
  }
};

TEST_F(Hybrid, BothPartsAreSummed) {
  for (const int ranks : {2, 3}) {
    Decisions::instance().reset();
    know(ranks);
    for (const size_t count : {kMiB, 2 * kMiB + 1, 3 * kMiB - 7}) {
      FakeStock stock(ranks);
      run_ranks(
          ranks,
          [&](Rank& rank) {
            Program program(rank);
            std::vector<float> values(count);
            const auto own = static_cast<float>(rank.rank());
            for (size_t i = 0; i < count; ++i) {
              values[i] = static_cast<float>(i % 251) + own;
            }
            Request request(DPT_ALL_REDUCE, DPT_FLOAT32, count);
            request.reduce_op(DPT_SUM).input(values.data()).output(values.data());
            for (int again = 0; again < 2; ++again) {
              EXPECT_EQ(program.run(request), DPT_COMPLETED);
            }
            program.lane().synchronize();
            const auto size = static_cast<float>(ranks);
            const float of_ranks = size * (size - 1) / 2;
            for (size_t i = 0; i < count; ++i) {
              const float once = size * static_cast<float>(i % 251) + of_ranks;
              ASSERT_EQ(values[i], size * once) << i;
            }
          },
          options(stock));
      const double part =
          static_cast<double>(stock.elements) / static_cast<double>(2 * ranks * count);
      EXPECT_NEAR(part, kPart / 100.0, 0.001);
    }
  }
  EXPECT_THAT(reason_of(AlgorithmName::kCpuReduce), HasSubstr("NCCL beside it with 40%"));
}

// NCCL's part of a maximum, say, isn't known to come out the same; others have no parts.
TEST_F(Hybrid, WhatCannotBeDividedIsNot) {
  know(2);
  FakeStock stock(2);
  run_ranks(
      2,
      [&](Rank& rank) {
        Program program(rank);
        std::vector<float> values(2 * kMiB, static_cast<float>(rank.rank()));
        Request request(DPT_ALL_REDUCE, DPT_FLOAT32, values.size());
        request.reduce_op(DPT_MAX).input(values.data()).output(values.data());
        EXPECT_EQ(program.run(request), DPT_COMPLETED);
        program.lane().synchronize();
        EXPECT_EQ(values, std::vector<float>(values.size(), 1.0F));
      },
      options(stock));
  EXPECT_EQ(stock.elements, 0);
}

TEST_F(Hybrid, IsChosenWhereBothTogetherAreFaster) {
  constexpr size_t kBytes = 4 * kMiB;
  fake_devices().staged_us = 600;
  FakeStock stock(2);
  // Its part adds this to that, less than nothing: CPU-Reduce has less to do.
  stock.time_us = [](size_t bytes) {
    const int percent = static_cast<int>((100 * bytes + kBytes / 2) / kBytes);
    return percent == 100 ? 700 : percent == 40 ? -250 : -100;
  };
  run_ranks(
      2,
      [&](Rank& rank) {
        Program program(rank);
        EXPECT_EQ(program.sum_ones(kBytes), DPT_COMPLETED);
        program.check_sum();
      },
      options(stock, DPT_TUNE_FORCE));
  const std::vector<DecisionRow> rows = Decisions::instance().rows();
  ASSERT_EQ(rows.size(), 1);
  EXPECT_EQ(rows[0].decision.chosen->delegated, 40) << rows[0].decision.reason;
}

TEST_F(Hybrid, WhatTheStockBackendFailsWithEndsTheGroup) {
  know(2);
  FakeStock stock(2);
  RankOptions raising = options(stock);
  raising.raise_errors = true;
  std::atomic<int> failed_first = 0;
  run_ranks(
      2,
      [&](Rank& rank) {
        Program program(rank);
        EXPECT_EQ(program.sum_ones(4 * kMiB), DPT_COMPLETED);
        program.check_sum();
        rank.barrier();
        stock.status = DPT_ERR_DELEGATE;
        const dpt_status own = failure_of([&] { program.sum_ones(4 * kMiB); }).status;
        if (own == DPT_ERR_DELEGATE) {
          ++failed_first;
        } else {
          EXPECT_EQ(own, DPT_ERR_ABORTED);  // the other one was first
        }
        EXPECT_EQ(failure_of([&] { program.sum_ones(4 * kMiB); }).status, DPT_ERR_ABORTED);
      },
      raising);
  EXPECT_GE(failed_first, 1);
}

// Its part would wait for that rank on the program's stream without end.
TEST_F(Hybrid, TheStockBackendsPartIsAbandonedWithALostRank) {
  know(2);
  FakeStock stock(2);
  RankOptions raising = options(stock);
  raising.raise_errors = true;
  run_ranks(
      2,
      [&](Rank& rank) {
        Program program(rank);
        EXPECT_EQ(program.sum_ones(4 * kMiB), DPT_COMPLETED);
        program.check_sum();
        rank.barrier();
        if (rank.rank() == 1) return rank.destroy();
        stock.times_abandoned = &rank.delegate().times_abandoned;
        EXPECT_EQ(program.sum_ones(4 * kMiB), DPT_COMPLETED);
        program.lane().synchronize();
        const Failure failure = failure_of([&] { program.sum_ones(4 * kMiB); });
        EXPECT_THAT(failure.what(), HasSubstr("rank 1 has left"));
        EXPECT_GE(rank.delegate().times_abandoned, 1);
      },
      raising);
  EXPECT_EQ(ends_, 0);
}

// If the program's stream has its commands in one queue with the lanes, each waits for all before
// it.
TEST(HybridPipeline, ComesToItsEndInOneQueue) {
  constexpr int kRanks = 3;
  constexpr int kTimes = 5;
  auto all = processes(kRanks, 1);
  for (auto& each : all) each->queues = std::make_unique<FakeQueues>(1, 3);
  StagedRanks ranks(all, {.threads = 1});
  std::vector<std::vector<float>> values(kRanks, std::vector<float>(10, 1.0F));
  std::vector<std::unique_ptr<Meeting>> meetings;
  std::vector<std::unique_ptr<Operation>> operations;
  for (int time = 0; time < kTimes; ++time) {
    meetings.push_back(std::make_unique<Meeting>(kRanks));
    operations.push_back(
        std::make_unique<Operation>(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 5003, kRanks, time));
    for (int rank = 0; rank < kRanks; ++rank) {
      FakeLane* const queue = all[rank]->queues->next();
      ranks[rank].enqueue(
          ranks.job(rank, operations[time]->request(rank), {512, 1}), 60s, queue, {.beside = [&] {
            queue->push(meetings[time]->sum(rank, values[rank].data(), values[rank].size()));
          }});
    }
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    all[rank]->queues->next()->synchronize();
    for (const auto& operation : operations) operation->check(rank);
    EXPECT_EQ(values[rank], std::vector<float>(10, 243.0F));
  }
}

// Or the others would blame a rank that is merely late, and end the group with that.
TEST(HybridPipeline, WhyAStartFailedIsToldBeforeTheOthersSeeIt) {
  auto all = processes(2, 1);
  StagedRanks ranks(all, {.threads = 1});
  Operation operation(DPT_ALL_REDUCE, DPT_FLOAT32, DPT_SUM, 5003, 2);
  std::string told;
  const auto failed = [&](const Error& error) {
    EXPECT_FALSE(ranks[1].is_broken());
    told = error.what();
  };
  const auto beside = [] { throw Error(DPT_ERR_DELEGATE, "no more memory"); };
  EXPECT_THROW(
      ranks[0].enqueue(
          ranks.job(0, operation.request(0), {512, 1}), 60s, &all[0]->stream, {beside, failed}),
      Error);
  EXPECT_EQ(told, "no more memory");
  EXPECT_TRUE(ranks[1].is_broken());
  ranks[0].release();
}

}  // namespace
}  // namespace dpt::testing
