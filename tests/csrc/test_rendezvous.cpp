// Ranks that wait for each other, but not for ever.
#include <gtest/gtest.h>
#include <unistd.h>

#include <barrier>
#include <thread>

#include "comm/rendezvous.hpp"
#include "rank_threads.hpp"

namespace dpt::testing {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = 3;
constexpr milliseconds kLong{20000};

// Runs `body` on each rank with its own view of one segment.
void run_on_segment(const std::function<void(const RunContext& context)>& body) {
  const int file = Segment::create_file(kRanks, Segment::kMinChunkBytes);
  run_threads(kRanks, [&](int rank) {
    Segment segment(dup(file), rank, {0, 1, 2});
    Operation none{};
    const Plan plan;
    const WaitContext wait{Deadline(kLong), [] { return std::string("a test"); }, nullptr};
    body({segment, none, plan, wait, WaitStyle::kBackground});
  });
  close(file);
}

TEST(Rendezvous, AllComeAgainAndAgain) {
  run_on_segment([](const RunContext& context) {
    for (uint32_t visit = 1; visit <= 200; ++visit) {
      EXPECT_TRUE(rendezvous(context, 5, visit, Deadline(kLong)));
    }
  });
}

TEST(Rendezvous, WhoWaitsForTooLongWithdrawsForAll) {
  std::barrier<> withdrawn(kRanks);
  run_on_segment([&](const RunContext& context) {
    EXPECT_TRUE(rendezvous(context, 0, 1, Deadline(kLong)));
    if (context.me() != 2) {
      EXPECT_FALSE(
          rendezvous(context, 0, 2, Deadline(context.me() == 0 ? milliseconds(30) : kLong)));
    }
    withdrawn.arrive_and_wait();
    if (context.me() == 2) {
      EXPECT_FALSE(rendezvous(context, 0, 2, Deadline(kLong)));
    }
    EXPECT_TRUE(rendezvous(context, 1, 1, Deadline(kLong)));  // another place
  });
}

TEST(Rendezvous, WhoDeclinesLetsNobodyWait) {
  run_on_segment([](const RunContext& context) {
    if (context.me() == 1) return decline(context, 0);
    EXPECT_FALSE(rendezvous(context, 0, 1, Deadline(kLong)));
  });
}

// One rank may lose patience while the last one comes: all get the same answer.
TEST(Rendezvous, GivesAllTheSameAnswer) {
  for (int turn = 0; turn < 50; ++turn) {
    std::atomic<int> came = 0;
    run_on_segment([&](const RunContext& context) {
      if (context.me() == 2) std::this_thread::sleep_for(milliseconds(2));
      const milliseconds patience = context.me() == 0 ? milliseconds(2) : kLong;
      came += rendezvous(context, 0, 1, Deadline(patience));
    });
    EXPECT_TRUE(came == 0 || came == kRanks) << came;
  }
}

TEST(Rendezvous, EndsWithTheGroup) {
  run_on_segment([](const RunContext& context) {
    if (context.me() == 0) {
      context.segment.abort(DPT_ERR_ABORTED, "for the test");
      return;
    }
    EXPECT_THROW(rendezvous(context, 0, 1, Deadline(kLong)), Error);
  });
}

}  // namespace
}  // namespace dpt::testing
