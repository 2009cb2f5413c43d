// Consequences of a kernel on a GPU that gave up (fake_device.hpp).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>
#include <utility>

#include "comm/end_process.hpp"
#include "comm/lost_rank.hpp"
#include "fake_device.hpp"
#include "rank_threads.hpp"

namespace dpt::testing {
namespace {

using ::testing::HasSubstr;

class DeviceFailure : public ::testing::Test {
 protected:
  DeviceFailure() {
    fake_devices() = {};
    fake_devices().why_absent = "";
    fake_devices().time_us = [](const DevicePlan&, size_t) { return 10.0; };
    fail_devices(std::nullopt);
    replace_end_process([this](const std::string& reason) {
      EXPECT_THAT(reason, HasSubstr(expected_));
      ++ends_;
    });
  }
  ~DeviceFailure() override {
    replace_end_process(nullptr);
    fail_devices(std::nullopt);
    fake_devices() = {};
  }

  static dpt_outcome sum(Rank& rank) {
    std::vector<float> values(64, 1.0F);
    Request request(DPT_ALL_REDUCE, DPT_FLOAT32, values.size());
    request.reduce_op(DPT_SUM).input(values.data()).output(values.data());
    request.request.on_device = 1;
    request.request.device = rank.rank();
    request.request.stream = [](void*) -> void* { return nullptr; };
    return rank.run(std::move(request));
  }

  static void wait_for_release(int groups) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (devices_released() < groups && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(devices_released(), groups);
  }

  // One operation goes well, then a kernel gives up; the next call says so.
  static void fail_between_two(Rank& rank) {
    EXPECT_EQ(sum(rank), DPT_COMPLETED);
    rank.barrier();
    if (rank.rank() == 0) {
      fail_devices(DeviceGroup::Failure{DeviceGroup::Failure::kTimeout, 1, 7});
    }
    wait_for_release(rank.size());
    try {
      sum(rank);
      ADD_FAILURE() << "the group has failed";
    } catch (const Failure& failure) {
      EXPECT_THAT(failure.what(), HasSubstr("native operation #7 on GPUs"));
    }
    // The delegate's work that is under way comes to its end.
    EXPECT_EQ(rank.delegate().times_abandoned, 0);
  }

  void await_end() const {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (ends_ == 0 && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  const char* expected_ = "rank 1 did not come in time";
  std::atomic<int> ends_ = 0;
};

TEST_F(DeviceFailure, EndsTheProcessOnEveryRank) {
  run_ranks(2, fail_between_two);
  EXPECT_EQ(ends_, 2);
}

TEST_F(DeviceFailure, BeginsWithWhoKeptTheOthersWaiting) {
  expected_ = "rank 1 is in train.py:88\nnative operation #7 on GPUs";
  const auto explain = [](const std::string& failure) {
    EXPECT_THAT(failure, HasSubstr("rank 1 did not come in time"));
    return std::string("rank 1 is in train.py:88");
  };
  run_ranks(2, fail_between_two, {.explain = explain});
  EXPECT_EQ(ends_, 2);
}

TEST_F(DeviceFailure, IsNotExplainedWhereNobodyCan) {
  const auto silent = [](const std::string&) { return std::string(); };
  run_ranks(2, fail_between_two, {.explain = silent});
  EXPECT_EQ(ends_, 2);
}

// A thread that waits for the GPU may have Python's lock: the process ends all the same.
TEST_F(DeviceFailure, DoesNotWaitForAnExplanationWithoutEnd) {
  static std::atomic<bool> over{false};
  static std::atomic<int> asked{0};
  const auto endless = [](const std::string&) {
    ++asked;
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    --asked;
    return std::string("too late");
  };
  run_ranks(2, fail_between_two, {.explain = endless});
  EXPECT_EQ(ends_, 2);
  over = true;
  while (asked > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

TEST_F(DeviceFailure, IsRaisedByTheNextCallWhereThatIsAskedFor) {
  run_ranks(2, fail_between_two, {.raise_errors = true});
  EXPECT_EQ(ends_, 0);
}

TEST_F(DeviceFailure, WhoEndsAGroupHimselfGoesOn) {
  std::barrier both(2);
  run_ranks(2, [&](Rank& rank) {
    EXPECT_EQ(sum(rank), DPT_COMPLETED);
    both.arrive_and_wait();
    rank.abort("for the test");
    both.arrive_and_wait();
    if (rank.rank() == 0) {
      fail_devices(DeviceGroup::Failure{DeviceGroup::Failure::kAborted, 1, 8});
    }
    wait_for_release(2);
    both.arrive_and_wait();
  });
  EXPECT_EQ(ends_, 0);
}

TEST_F(DeviceFailure, WhoWaitsForARankThatLeftIsToldSo) {
  expected_ = "rank 1 has left the group";
  fake_devices().waiting = true;
  run_ranks(2, [](Rank& rank) {
    EXPECT_EQ(sum(rank), DPT_COMPLETED);
    if (rank.rank() == 0) wait_for_release(1);
  });
  EXPECT_EQ(ends_, 1);
}

// NCCL's waits for it without end, whether or not the group has kernels of ours.
TEST_F(DeviceFailure, WhatTheDelegateCarriesOutWaitsForALostRankInVain) {
  expected_ = "that NCCL carries out on rank 0 waits in vain: rank 1 has left the group";
  LostRank::patience().with_left = std::chrono::milliseconds(300);
  for (const bool has_kernels : {true, false}) {
    ends_ = 0;
    fail_devices(std::nullopt);
    fake_devices().peer_access = has_kernels;
    fake_devices().unmappable_rank = has_kernels ? -1 : 1;
    run_ranks(2, [&](Rank& rank) {
      EXPECT_EQ(sum(rank), has_kernels ? DPT_COMPLETED : DPT_DELEGATED);
      if (rank.rank() == 1) return;
      rank.delegate().is_waiting = DPT_WAITS_ON_STREAM;
      await_end();
    });
    EXPECT_EQ(ends_, 1) << "with kernels: " << has_kernels;
  }
  LostRank::patience() = {};
}

TEST_F(DeviceFailure, WhereErrorsAreRaisedTheDelegateThatWaitsInVainIsAbandoned) {
  LostRank::patience().with_left = std::chrono::milliseconds(300);
  fake_devices().peer_access = false;
  fake_devices().unmappable_rank = 1;
  run_ranks(
      2,
      [&](Rank& rank) {
        EXPECT_EQ(sum(rank), DPT_DELEGATED);
        if (rank.rank() == 1) return;
        rank.delegate().is_waiting = DPT_WAITS_ON_STREAM;
        const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
        while (rank.delegate().times_abandoned == 0 && std::chrono::steady_clock::now() < limit) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        EXPECT_EQ(rank.delegate().times_abandoned, 1);
        try {
          sum(rank);
          ADD_FAILURE() << "the group has failed";
        } catch (const Failure& failure) {
          EXPECT_THAT(failure.what(), HasSubstr("rank 1 has left the group"));
        }
      },
      {.raise_errors = true});
  EXPECT_EQ(ends_, 0);
  LostRank::patience() = {};
}

// A rank that can't start NCCL hears of it at once, and the others sit in NCCL's start.
TEST_F(DeviceFailure, WhoWaitsForARankWhoseDelegateFailedIsToldWhy) {
  expected_ = "waits in vain: rank 1 could not go on with it: No space left on device (28)";
  LostRank::patience().with_failed = std::chrono::milliseconds(300);
  fake_devices().peer_access = false;
  fake_devices().unmappable_rank = 1;
  for (const auto& [raise_errors, leaves_at_once] :
       {std::pair{false, false}, {true, false}, {false, true}}) {
    ends_ = 0;
    const auto wait_for_the_other =
        [&, raise_errors = raise_errors, leaves_at_once = leaves_at_once](Rank& rank) {
          if (rank.rank() == 0) {
            EXPECT_EQ(sum(rank), DPT_DELEGATED);
            // Nothing can be raised while the program's thread is inside NCCL.
            rank.delegate().is_waiting = raise_errors ? DPT_WAITS_IN_START : DPT_WAITS_ON_STREAM;
            return await_end();
          }
          rank.delegate().status = DPT_ERR_DELEGATE_BROKE;
          rank.delegate().message =
              "NCCL error in: a.cpp:1\nncclSystemError: A call failed.\nLast error:\n"
              "No space left on device (28)\n";
          try {
            sum(rank);
            ADD_FAILURE() << "the delegate has failed";
          } catch (const Failure& failure) {
            EXPECT_EQ(failure.status, DPT_ERR_DELEGATE);
            EXPECT_THAT(failure.what(), HasSubstr("NCCL error in: a.cpp:1"));
          }
          if (!leaves_at_once) await_end();
        };
    run_ranks(2, wait_for_the_other, {.raise_errors = raise_errors});
    EXPECT_EQ(ends_, 1) << "raise_errors: " << raise_errors
                        << ", leaves at once: " << leaves_at_once;
  }
  LostRank::patience() = {};
}

TEST_F(DeviceFailure, ADelegateThatFailedMayBeTriedAgain) {
  LostRank::patience().with_failed = std::chrono::milliseconds(300);
  fake_devices().peer_access = false;
  fake_devices().unmappable_rank = 1;
  std::barrier both(2);
  run_ranks(2, [&](Rank& rank) {
    rank.delegate().status = DPT_ERR_DELEGATE_BROKE;
    EXPECT_THROW(sum(rank), Failure);
    both.arrive_and_wait();
    rank.delegate().status = DPT_OK;
    EXPECT_EQ(sum(rank), DPT_DELEGATED);
    EXPECT_EQ(rank.num_known(), 1);
    both.arrive_and_wait();
    rank.delegate().is_waiting = DPT_WAITS_ON_STREAM;
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    rank.delegate().is_waiting = DPT_WAITS_NOT;
    both.arrive_and_wait();
  });
  EXPECT_EQ(ends_, 0);
  LostRank::patience() = {};
}

TEST_F(DeviceFailure, ARankThatLeftIsNobodysFailureWhereNothingWaits) {
  run_ranks(2, [](Rank& rank) {
    EXPECT_EQ(sum(rank), DPT_COMPLETED);
    if (rank.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  });
  EXPECT_EQ(ends_, 0);
}

TEST(LostRank, IsWaitedForOnceNothingElseCanBe) {
  using std::chrono::seconds;
  const LostRank::Time now{};
  for (const bool died : {true, false}) {
    LostRank lost;
    EXPECT_FALSE(lost.is_long_gone(now));
    lost.note("rank 1 is gone", died ? LostRank::How::kDied : LostRank::How::kLeft, now);
    EXPECT_EQ(lost.who(), "rank 1 is gone");
    EXPECT_FALSE(lost.is_long_gone(now));
    EXPECT_TRUE(lost.is_long_gone(now + seconds(2)));
    EXPECT_FALSE(lost.keeps_waiting(true, now));
    EXPECT_FALSE(lost.keeps_waiting(true, now + seconds(9)));
    EXPECT_FALSE(lost.keeps_waiting(false, now + seconds(30)));  // it was computing after all
    EXPECT_FALSE(lost.keeps_waiting(true, now + seconds(31)));
    EXPECT_EQ(lost.keeps_waiting(true, now + seconds(42)), died);
    EXPECT_TRUE(lost.keeps_waiting(true, now + seconds(52)));
  }
}

TEST(LostRank, SaysFirstWhatARankFailedAtBeforeItLeft) {
  const LostRank::Time now{};
  LostRank lost;
  lost.note("rank 1 could not go on", LostRank::How::kStockFailed, now);
  EXPECT_FALSE(lost.is_long_gone(now + std::chrono::seconds(2))) << "it lives";
  lost.note("rank 1 has left", LostRank::How::kLeft, now);
  EXPECT_EQ(lost.who(), "rank 1 could not go on; then rank 1 has left");
  EXPECT_TRUE(lost.is_long_gone(now + std::chrono::seconds(2)));
  EXPECT_FALSE(lost.keeps_waiting(true, now));
  EXPECT_TRUE(lost.keeps_waiting(true, now + std::chrono::seconds(10)));
}

}  // namespace
}  // namespace dpt::testing
