// How ranks meet: the in-memory store, the exchange over it, and what ranks say of themselves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.hpp"
#include "bootstrap/exchange.hpp"
#include "rank_threads.hpp"

namespace dpt::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

WaitContext wait_for(milliseconds timeout, std::function<bool()> interrupted = {}) {
  return {Deadline(timeout), [] { return std::string("the test"); }, std::move(interrupted)};
}

// In nanoseconds, as clocks count, all but the first overflow.
TEST(Deadline, NoneIsTooLong) {
  for (const milliseconds timeout :
       {kLongestWait, milliseconds(std::chrono::hours(24 * 365 * 300)), milliseconds::max()}) {
    const Deadline deadline(timeout);
    EXPECT_FALSE(deadline.expired());
    EXPECT_EQ(deadline.next_slice(), kWaitSlice);
    EXPECT_EQ(deadline.timeout(), kLongestWait);
    EXPECT_FALSE(deadline.later(milliseconds(1000)).expired());
    EXPECT_FALSE(Deadline(deadline.timeout() + milliseconds(1000)).expired());
  }
}

TEST(Deadline, NoneIsTooShort) {
  for (const milliseconds timeout : {milliseconds(0), milliseconds(-1), milliseconds::min()}) {
    const Deadline deadline(timeout);
    EXPECT_TRUE(deadline.expired());
    EXPECT_EQ(deadline.next_slice(), milliseconds(0));
    EXPECT_EQ(deadline.timeout(), milliseconds(0));
  }
}

TEST(HashStore, GivesWhatWasSetAndNothingElse) {
  HashStore store;
  EXPECT_FALSE(store.get("key", milliseconds(1)));
  store.set("key", std::string("a\0b", 3));
  EXPECT_EQ(store.get("key", milliseconds(0)), std::string("a\0b", 3));
  store.set("key", "");
  EXPECT_EQ(store.get("key", milliseconds(0)), "");
}

TEST(HashStore, WakesTheOneWhoWaits) {
  HashStore store;
  run_threads(2, [&](int index) {
    if (index == 0) {
      EXPECT_EQ(store.get("key", milliseconds(20000)), "value");
    } else {
      store.set("key", "value");
    }
  });
}

TEST(AllGather, GivesEveryRanksWordsInRankOrder) {
  HashStore store;
  run_threads(4, [&](int index) {
    const std::string mine(1 + 5000 * static_cast<size_t>(index), 'x');
    const auto all =
        all_gather(store, "key", index, {0, 1, 2, 3}, mine, wait_for(milliseconds(20000)));
    ASSERT_EQ(all.size(), 4U);
    for (size_t rank = 0; rank < all.size(); ++rank) EXPECT_EQ(all[rank].size(), 1 + 5000 * rank);
  });
}

TEST(AllGather, NamesEveryRankThatDidNotCome) {
  HashStore store;
  store.set("key/2", "here");
  try {
    all_gather(store, "key", 0, {10, 11, 12, 13}, "me", wait_for(milliseconds(150)));
    FAIL() << "nobody came";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), DPT_ERR_TIMEOUT);
    EXPECT_THAT(error.what(), HasSubstr("the test"));
    EXPECT_THAT(error.what(), HasSubstr("rank(s) 11, 13 "));
  }
}

TEST(AllGather, CanBeInterrupted) {
  HashStore store;
  try {
    all_gather(store, "key", 0, {0, 1}, "me", wait_for(milliseconds(20000), [] { return true; }));
    FAIL() << "nobody came";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), DPT_ERR_INTERRUPTED);
  }
}

TEST(Meet, BringsEveryRanksWordsInRankOrder) {
  HashStore store;
  std::vector<std::string> ids(3);
  // Again on the same store: nobody may take the first meeting's list for the second's.
  for (int round = 0; round < 3; ++round) {
    run_threads(3, [&](int index) {
      const std::string mine = "rank " + std::to_string(index) + " of " + std::to_string(round);
      const Meeting met = meet(store, index, {0, 1, 2}, mine, wait_for(milliseconds(20000)));
      ASSERT_EQ(met.words.size(), 3U);
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(met.words[rank], "rank " + std::to_string(rank) + " of " + std::to_string(round));
      }
      if (index == 0) ids[round] = met.id;
    });
  }
  EXPECT_NE(ids[0], ids[1]);
  EXPECT_NE(ids[1], ids[2]);
}

TEST(Meet, NamesEveryRankThatDidNotCome) {
  HashStore store;
  run_threads(2, [&](int index) {
    try {
      meet(store, 2 * index, {10, 11, 12, 13}, "me", wait_for(milliseconds(300)));
      FAIL() << "two did not come";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), DPT_ERR_TIMEOUT);
      EXPECT_THAT(error.what(), HasSubstr("rank(s) 11, 13 "));
    }
  });
}

TEST(Meet, SaysWhetherAMissingRankMadeTheGroup) {
  HashStore store;
  store.set("deepytorch/process/2", "its mark");
  try {
    meet(store, 0, {10, 11, 12}, "me", wait_for(milliseconds(100)));
    FAIL() << "two did not come";
  } catch (const Error& error) {
    EXPECT_THAT(
        error.what(),
        AllOf(
            HasSubstr(
                "rank(s) 11 did not join within the timeout of 100 ms and have not made the group"),
            HasSubstr(
                " Rank(s) 12 did not join within the timeout of 100 ms though they have made")));
  }
}

TEST(Meet, DoesNotBlameRanksThatAnsweredWhereTheFirstGoesAway) {
  HashStore store;
  store.set("deepytorch/meeting", "abc");
  store.set("deepytorch/abc/answer/0", "1 rank 0, which stops here");
  try {
    meet(store, 1, {10, 11}, "me", wait_for(milliseconds(100)));
    FAIL() << "nobody wrote the list";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 10 did not bring the meeting of all ranks to its "));
  }
}

TEST(Meet, NamesTheFirstRankWhenItDidNotCome) {
  HashStore store;
  try {
    meet(store, 1, {10, 11}, "me", wait_for(milliseconds(100)));
    FAIL() << "rank 10 did not come";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), DPT_ERR_TIMEOUT);
    EXPECT_THAT(error.what(), HasSubstr("rank(s) 10 did not join within the timeout of 100 ms"));
  }
}

TEST(PeerInfo, SurvivesTheJourney) {
  PeerInfo info = PeerInfo::of_this_process();
  info.process = random_id();
  EXPECT_GT(info.pid, 0);
  EXPECT_FALSE(info.affinity.empty());
  info.max_chunk_bytes = 1 << 20;
  info.fixed_chunk_bytes = 4096;
  const PeerInfo parsed = PeerInfo::parse(info.serialize());
  EXPECT_EQ(parsed.serialize(), info.serialize());
  EXPECT_EQ(parsed.boot_id, info.boot_id);
  EXPECT_EQ(parsed.affinity, info.affinity);
}

TEST(PeerInfo, MalformedWordsAreRefused) {
  for (const char* text : {"", "a b", "a b c 1 2 3 4 0 99999999 1", "a b c 1 2 3 4 0 2 1"}) {
    EXPECT_THROW(PeerInfo::parse(text), Error) << '"' << text << '"';
  }
}

TEST(ProcessMark, TellsTheLivingFromTheDead) {
  EXPECT_FALSE(dead_process(own_process_mark()));
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const std::string mark = own_process_mark();
    const ssize_t written = write(pipe_ends[1], mark.data(), mark.size());
    _exit(written == static_cast<ssize_t>(mark.size()) ? 0 : 1);
  }
  char text[512];
  const ssize_t length = read(pipe_ends[0], text, sizeof text);
  ASSERT_GT(length, 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  const std::string mark(text, length);
  EXPECT_EQ(dead_process(mark), std::to_string(child));
  EXPECT_EQ(dead_process(mark + " " + stamp_of_now() + " and more"), std::to_string(child));
  // Left before this process started, so by a rank's earlier life.
  EXPECT_FALSE(dead_process(mark + " 1 and more"));
  EXPECT_FALSE(dead_process("another-node pid:[1] 1 2"));
  EXPECT_FALSE(dead_process("nonsense"));
}

TEST(ForeignStore, LongValuesComeWhole) {
  // The C ABI hands values over in a buffer that may be too small at first.
  run_ranks(2, [](Rank& rank) { rank.barrier(); }, {.group = std::string(3000, 'k')});
}

}  // namespace
}  // namespace dpt::testing
