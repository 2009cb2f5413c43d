// The short way of operations on GPUs that are known to be the delegate's (NOTE [Short way]), which
// Rank::run takes as the adapter does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>

#include "comm/end_process.hpp"
#include "comm/flight_record.hpp"
#include "comm/known_delegated.hpp"
#include "comm/statistics.hpp"
#include "fake_device.hpp"
#include "rank_threads.hpp"

namespace dpt::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ShortWay : public ::testing::Test {
 protected:
  // No rank reaches another's memory.
  ShortWay() {
    reset_statistics();
    fake_devices() = {};
    fake_devices().why_absent = "";
    fake_devices().peer_access = false;
    fake_devices().unmappable_rank = 1;
    fail_devices(std::nullopt);
  }
  ~ShortWay() override {
    fake_devices() = {};
    fail_devices(std::nullopt);
  }
};

// Makes the ranks meet by peer access, where each kernel takes 1 ms: few calls make a round then.
void join_by_peer_access() {
  fake_devices().unmappable_rank = -1;
  fake_devices().peer_access = true;
  fake_devices().time_us = [](const DevicePlan&, size_t) { return 1000.0; };
}

Request sum_of(Rank& rank, size_t count, dpt_data_type dtype = DPT_FLOAT32) {
  static char buffer[1];
  Request request(DPT_ALL_REDUCE, dtype, count);
  request.reduce_op(DPT_SUM).input(buffer).output(buffer);
  request.request.on_device = 1;
  request.request.device = rank.rank();
  request.request.stream = [](void*) -> void* { return nullptr; };
  return request;
}

uint64_t calls_counted() {
  uint64_t calls = 0;
  for (const StatisticsRow& row : all_statistics()) {
    if (row.collective == DPT_ALL_REDUCE) calls += row.calls;
  }
  return calls;
}

TEST_F(ShortWay, IsTakenByTheSameOperationAlone) {
  run_ranks(1, [](Rank& rank) {
    EXPECT_EQ(rank.run(sum_of(rank, 1000)), DPT_DELEGATED);
    EXPECT_EQ(rank.num_known(), 0);
    EXPECT_EQ(rank.run(sum_of(rank, 1000)), DPT_DELEGATED);
    EXPECT_EQ(rank.num_known(), 1);
    rank.run(sum_of(rank, 1001));
    rank.run(sum_of(rank, 1000, DPT_BFLOAT16));
    rank.run(std::move(sum_of(rank, 1000).reduce_op(DPT_MAX)));
    EXPECT_EQ(rank.num_known(), 1);
    rank.run(std::move(sum_of(rank, 1000).reduce_op(DPT_MAX)));
    EXPECT_EQ(rank.num_known(), 2);
    EXPECT_EQ(rank.delegate().calls.size(), 6);
    EXPECT_EQ(calls_counted(), 6);
  });
}

TEST_F(ShortWay, IsNotForWhatTheKeyLeavesOut) {
  run_ranks(1, [](Rank& rank) {
    for (int i = 0; i < 2; ++i) {
      rank.run(std::move(sum_of(rank, 1000).not_native("sparse tensors")));
      rank.run(std::move(sum_of(rank, 2000).counts({2000}, {2000})));
    }
    EXPECT_EQ(rank.num_known(), 0);
    EXPECT_EQ(calls_counted(), 4);
  });
}

// As DDP's buckets, FSDP's layers and a loss or two have them.
TEST_F(ShortWay, HasRoomForTheSizesOfAModel) {
  constexpr int kSteps = 10;
  constexpr size_t kSizes = 40;
  run_ranks(1, [](Rank& rank) {
    for (int step = 0; step < kSteps; ++step) {
      for (size_t layer = 1; layer <= kSizes; ++layer) rank.run(sum_of(rank, layer * layer << 12));
    }
    EXPECT_EQ(rank.num_known(), (kSteps - 1) * kSizes);
  });
}

TEST_F(ShortWay, OneThatIsNotedAgainPushesNoneOut) {
  KnownDelegated known;
  dpt_request request{};
  request.count = 1000;
  request.dtype = DPT_FLOAT32;
  known.add(request, false, nullptr);
  for (int again = 0; again < 10; ++again) {
    request.dtype = DPT_BFLOAT16;  // of the same set
    known.add(request, false, nullptr);
  }
  EXPECT_NE(known.find(request), nullptr);
  request.dtype = DPT_FLOAT32;
  EXPECT_NE(known.find(request), nullptr);
}

// More kinds than there are places for.
TEST_F(ShortWay, ManySizesPushEachOtherOut) {
  run_ranks(1, [](Rank& rank) {
    for (int again = 0; again < 3; ++again) {
      for (size_t count = 1; count <= 200; ++count) {
        EXPECT_EQ(rank.run(sum_of(rank, count << 10)), DPT_DELEGATED);
      }
    }
    EXPECT_EQ(rank.delegate().calls.size(), 600);
    EXPECT_EQ(calls_counted(), 600);
    EXPECT_LT(rank.num_known(), 600);
  });
}

TEST_F(ShortWay, IsInTheFlightRecordAsDelegated) {
  run_ranks(1, [](Rank& rank) {
    for (int i = 0; i < 2; ++i) rank.run(sum_of(rank, 777));
    ASSERT_EQ(rank.num_known(), 1);
    std::vector<char> record(1 << 20);
    const ssize_t bytes = pread(FlightRecord::instance().fd(), record.data(), record.size(), 0);
    ASSERT_GT(bytes, 0);
    const auto* const header = reinterpret_cast<const FlightRecord::Header*>(record.data());
    const size_t entries = header->header_bytes + header->groups * header->group_bytes +
                           header->peers * header->peer_bytes +
                           header->places * header->place_bytes;
    const uint64_t last = header->next - 1;
    const auto* const entry = reinterpret_cast<const FlightRecord::Entry*>(
        record.data() + entries + last % header->entries * header->entry_bytes);
    EXPECT_EQ(entry->count, 777);
    EXPECT_EQ(entry->how, FlightRecord::kDelegated);
    EXPECT_EQ(entry->state, FlightRecord::kIssued);
  });
}

TEST_F(ShortWay, EndsWithTheGroup) {
  run_ranks(1, [](Rank& rank) {
    for (int i = 0; i < 2; ++i) rank.run(sum_of(rank, 1000));
    rank.abort("for the test");
    const Failure failure = failure_of([&] { rank.run(sum_of(rank, 1000)); });
    EXPECT_EQ(failure.status, DPT_ERR_ABORTED);
    EXPECT_THAT(failure.what(), HasSubstr("for the test"));
    EXPECT_EQ(rank.num_known(), 1);
  });
}

TEST_F(ShortWay, TellsWhatTheDelegateFailsWith) {
  std::barrier both(2);
  run_ranks(2,
            [&](Rank& rank) {
              for (int i = 0; i < 2; ++i) EXPECT_EQ(rank.run(sum_of(rank, 1000)), DPT_DELEGATED);
              EXPECT_EQ(rank.num_known(), 1);
              both.arrive_and_wait();
              rank.delegate().status = DPT_ERR_DELEGATE_BROKE;
              const Failure failure = failure_of([&] { rank.run(sum_of(rank, 1000)); });
              EXPECT_EQ(failure.status, DPT_ERR_DELEGATE);
              EXPECT_THAT(failure.what(), HasSubstr("the delegate's own words"));
              EXPECT_EQ(rank.num_known(), 2);
              both.arrive_and_wait();
              rank.delegate().status = DPT_OK;
              EXPECT_EQ(rank.run(sum_of(rank, 1000)), DPT_DELEGATED);
              both.arrive_and_wait();
            },
            {.raise_errors = true});
}

// Copy engines might serve the larger of these, which no graph may replay; here the delegate does.
TEST_F(ShortWay, IsForEverySizeThatWasMeasuredToBeTheDelegates) {
  join_by_peer_access();
  const auto stock = [](const dpt_request&) {
    advance_device(100);
    return DPT_OK;
  };
  for (const dpt_collective collective : {DPT_ALL_REDUCE, DPT_ALL_GATHER}) {
    for (const size_t count : {size_t{1} << 14, size_t{1} << 22}) {
      run_ranks(2,
                [&](Rank& rank) {
                  std::vector<float> values(count);
                  std::vector<float> gathered(2 * count);
                  Request request = sum_of(rank, count);
                  request.request.collective = collective;
                  if (collective == DPT_ALL_GATHER) request.reduce_op(DPT_NO_REDUCE);
                  request.inputs = {values.data()};
                  request.outputs = {gathered.data(), gathered.data() + count};
                  request.request.busy = [](void*) { return 0; };
                  for (int i = 0; i < 2; ++i) EXPECT_EQ(rank.run(request), DPT_DELEGATED);
                  EXPECT_EQ(rank.num_known(), 1) << count << " of " << collective;
                },
                {.tune = DPT_TUNE_AUTO, .execute = stock});
    }
  }
}

TEST_F(ShortWay, IsClosedOnceTheGpusGroupHasFailed) {
  join_by_peer_access();
  std::atomic<int> ends = 0;
  replace_end_process([&](const std::string&) { ++ends; });
  std::barrier both(2);
  const auto stock = [](const dpt_request&) {
    advance_device(100);
    return DPT_OK;
  };
  run_ranks(2,
            [&](Rank& rank) {
              std::vector<float> values(1 << 18);
              Request request = sum_of(rank, values.size());
              request.inputs = {values.data()};
              request.outputs = {values.data()};
              for (int i = 0; i < 2; ++i) EXPECT_EQ(rank.run(request), DPT_DELEGATED);
              EXPECT_EQ(rank.num_known(), 1);
              both.arrive_and_wait();
              if (rank.rank() == 0) {
                fail_devices(DeviceGroup::Failure{DeviceGroup::Failure::kTimeout, 1, 7});
              }
              both.arrive_and_wait();
              const Failure failure = failure_of([&] { rank.run(request); });
              EXPECT_THAT(failure.what(), HasSubstr("native operation #7 on GPUs"));
              EXPECT_EQ(rank.num_known(), 1);
              both.arrive_and_wait();
            },
            {.tune = DPT_TUNE_AUTO, .raise_errors = true, .execute = stock});
  EXPECT_EQ(ends, 0);
  replace_end_process(nullptr);
}

// As a program gives a list of them.
class Coalesced : public ShortWay {
 protected:
  // Native code takes 1 ms for anything, the stock backend 0.1 ms from 1 MiB on and else 10.
  Coalesced() { join_by_peer_access(); }

  static dpt_status run_stock(const dpt_request& request) {
    advance_device(request.count >= kLarge ? 100 : 10'000);
    return DPT_OK;
  }

  static dpt_outcome run_alone(Rank& rank, size_t count) {
    std::vector<float> values(count);
    Request request = sum_of(rank, count);
    request.inputs = {values.data()};
    request.outputs = {values.data()};
    return rank.run(request);
  }

  static constexpr size_t kLarge = 1 << 18;
  const RankOptions options_{.tune = DPT_TUNE_AUTO, .execute = run_stock};
};

TEST_F(Coalesced, StartTogetherOnceTheRanksHaveMet) {
  run_ranks(
      2,
      [](Rank& rank) {
        const auto both = [&] {
          return std::vector{sum_of(rank, kLarge), sum_of(rank, 5 * kLarge)};
        };
        EXPECT_THAT(rank.begin_coalesced(both()), IsEmpty());
        EXPECT_EQ(run_alone(rank, 5 * kLarge), DPT_DELEGATED);
        rank.barrier();
        const uint64_t counted = calls_counted();
        rank.barrier();
        EXPECT_THAT(rank.begin_coalesced(both()), ElementsAre(0, 1));
        rank.barrier();
        EXPECT_EQ(calls_counted(), counted + 4);
      },
      options_);
}

TEST_F(Coalesced, StartTogetherWhateverIsFasterAlone) {
  run_ranks(
      2,
      [](Rank& rank) {
        EXPECT_EQ(run_alone(rank, kLarge), DPT_DELEGATED);
        EXPECT_EQ(run_alone(rank, 1000), DPT_COMPLETED);
        // 100,000 are of a size that nobody has measured yet.
        EXPECT_THAT(
            rank.begin_coalesced({sum_of(rank, kLarge), sum_of(rank, 1000), sum_of(rank, 100'000)}),
            ElementsAre(0, 1, 2));
        EXPECT_THAT(rank.begin_coalesced({sum_of(rank, 1000)}), IsEmpty());
      },
      options_);
}

TEST_F(Coalesced, AreNativeWhereThatIsAskedFor) {
  run_ranks(2, [](Rank& rank) {
    EXPECT_EQ(run_alone(rank, 1000), DPT_COMPLETED);
    EXPECT_THAT(rank.begin_coalesced({sum_of(rank, 1000), sum_of(rank, 1000)}), IsEmpty());
  });
}

TEST_F(Coalesced, StartTogetherWhereNothingIsNative) {
  run_ranks(1, [](Rank& rank) {
    EXPECT_THAT(rank.begin_coalesced({sum_of(rank, 10), sum_of(rank, kLarge)}), ElementsAre(0, 1));
    EXPECT_EQ(calls_counted(), 2);
    rank.abort("for the test");
    EXPECT_THAT(rank.begin_coalesced({sum_of(rank, 10), sum_of(rank, kLarge)}), IsEmpty());
    EXPECT_EQ(calls_counted(), 2);
  });
}

}  // namespace
}  // namespace dpt::testing
