// Sends and receives between ranks of one node.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <random>
#include <thread>
#include <utility>

#include "comm/fabric.hpp"
#include "comm/statistics.hpp"
#include "messages.hpp"

namespace dpt::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Past the mailbox's ring, and several of its slots.
constexpr size_t kLarge = 700001;
// Lies in the mailbox until somebody receives it.
constexpr size_t kSmall = 1000;

TEST(PointToPoint, OfEverySizeArrive) {
  run_ranks(2, [](Rank& rank) {
    for (const size_t count :
         {size_t{0}, size_t{1}, kSmall, size_t{16384}, size_t{16385}, kLarge}) {
      if (rank.rank() == 0) {
        EXPECT_EQ(rank.run(send(numbers(count, 5), 1)), DPT_COMPLETED);
      } else {
        Values values(count);
        EXPECT_EQ(rank.run(recv(values, 0)), DPT_COMPLETED);
        EXPECT_EQ(values, numbers(count, 5));
      }
    }
    EXPECT_TRUE(rank.delegate().calls.empty());
  });
}

TEST(PointToPoint, NeedOnlyTheTwoRanksTheyConcern) {
  // The group's first operation, of which ranks 1 and 3 know nothing.
  run_ranks(4, [](Rank& rank) {
    Values values = numbers(kSmall, rank.rank());
    if (rank.rank() == 0) rank.run(send(values, 2));
    if (rank.rank() == 2) {
      rank.run(recv(values, 0));
      EXPECT_EQ(values, numbers(kSmall, 0));
    }
    if (rank.rank() % 2 == 0) rank.run(send(values, 3, 9));
    rank.barrier();
    for (int i = 0; i < 2 && rank.rank() == 3; ++i) {
      int source = -1;
      rank.run(recv_any(values, &source, 9));
      EXPECT_THAT(source, ::testing::AnyOf(0, 2));
    }
  });
}

TEST(PointToPoint, AlsoAfterAThirdRankHasLeftWithoutUsingTheGroup) {
  std::promise<void> left;
  std::shared_future<void> has_left = left.get_future().share();
  run_ranks(3, [&](Rank& rank) {
    if (rank.rank() == 0) {
      rank.destroy();
      return left.set_value();
    }
    has_left.wait();
    Values values = numbers(kLarge, 1);
    rank.run(rank.rank() == 1 ? send(values, 2) : recv(values, 1));
    const Failure failure = failure_of([&] { rank.run(recv(values, 0)); });
    EXPECT_EQ(failure.status, DPT_ERR_PEER_LOST);
  });
}

TEST(PointToPoint, JoinAGroupWhoseCollectiveWaitsElsewhere) {
  // Rank 1 is in the group's first collective when rank 0 wants its message received by rank 2.
  run_ranks(3, [](Rank& rank) {
    Values values = numbers(kLarge, 1);
    if (rank.rank() == 1) return rank.barrier();
    rank.run(rank.rank() == 0 ? send(values, 2) : recv(values, 0));
    rank.barrier();
  });
}

TEST(PointToPoint, WithOneTagKeepTheirOrderAndOtherTagsOvertake) {
  run_ranks(2, [](Rank& rank) {
    std::vector<Values> sent;
    for (int i = 0; i < 12; ++i) sent.push_back(numbers(i % 3 == 0 ? kLarge / 4 : kSmall + i, i));
    std::vector<Pending> pending;
    if (rank.rank() == 0) {
      for (int i = 0; i < 12; ++i) pending.push_back(rank.start(send(sent[i], 1, i % 2)));
      for (Pending& each : pending) each.get();
    } else {
      for (const int tag : {1, 0}) {
        for (int i = tag; i < 12; i += 2) {
          Values values(sent[i].size());
          rank.run(recv(values, 0, tag));
          EXPECT_EQ(values, sent[i]);
        }
      }
    }
  });
}

TEST(PointToPoint, SmallOnesAreSentBeforeAnybodyReceives) {
  run_ranks(2, [](Rank& rank) {
    const int peer = 1 - rank.rank();
    rank.run(send(numbers(kSmall, rank.rank()), peer));
    Values values(kSmall);
    rank.run(recv(values, peer));
    EXPECT_EQ(values, numbers(kSmall, peer));
  });
}

TEST(PointToPoint, LargeOnesCrossEachOther) {
  run_ranks(3, [](Rank& rank) {
    std::vector<Values> received(3, Values(kLarge));
    const Values mine = numbers(kLarge, rank.rank());
    std::vector<Pending> pending;
    for (int peer = 0; peer < 3; ++peer) {
      pending.push_back(rank.start(send(mine, peer)));
    }
    for (int peer = 0; peer < 3; ++peer) {
      pending.push_back(rank.start(recv(received[peer], peer)));
    }
    for (Pending& each : pending) each.get();
    for (int peer = 0; peer < 3; ++peer) EXPECT_EQ(received[peer], numbers(kLarge, peer));
  });
}

TEST(PointToPoint, AndCollectivesDoNotWaitForEachOther) {
  run_ranks(2, [](Rank& rank) {
    Values received(kLarge);
    const Values mine = numbers(kLarge, rank.rank());
    Pending pending;
    if (rank.rank() == 0) pending = rank.start(recv(received, 1));
    rank.barrier();
    if (rank.rank() == 1) pending = rank.start(send(mine, 0));
    rank.barrier();
    pending.get();
    if (rank.rank() == 0) {
      EXPECT_EQ(received, numbers(kLarge, 1));
    }
  });
}

TEST(PointToPoint, FromAnyRankTellTheirSender) {
  constexpr int kSize = 4;
  run_ranks(kSize, [](Rank& rank) {
    if (rank.rank() != 0) return (void)rank.run(send(numbers(20000, rank.rank()), 0, 3));
    std::vector<int> senders;
    for (int i = 1; i < kSize; ++i) {
      Values values(20000);
      int source = -1;
      rank.run(recv_any(values, &source, 3));
      EXPECT_EQ(values, numbers(20000, source));
      senders.push_back(source);
    }
    EXPECT_THAT(senders, ::testing::UnorderedElementsAre(1, 2, 3));
  });
}

// Freed with the test; of the process's pool when `registered`.
class Buffer {
 public:
  Buffer(bool registered, size_t count) : plain_(registered ? 0 : count), count_(count) {
    if (registered) address_ = Fabric::instance().memory().allocate(count * sizeof(int32_t));
  }
  Buffer(Buffer&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)),
        plain_(std::move(other.plain_)),
        count_(other.count_) {}
  ~Buffer() {
    if (address_ != nullptr) Fabric::instance().memory().free(address_);
  }
  int32_t* data() { return address_ ? static_cast<int32_t*>(address_) : plain_.data(); }
  Values values() { return {data(), data() + count_}; }

 private:
  void* address_ = nullptr;
  Values plain_;
  size_t count_;
};

TEST(PointToPoint, BetweenRegisteredAndPlainMemory) {
  struct Pair {
    Buffer sender;
    Buffer receiver;
  };
  std::deque<Pair> pairs;
  for (const bool sender : {true, false}) {
    for (const bool receiver : {true, false}) {
      pairs.push_back({Buffer(sender, kLarge), Buffer(receiver, kLarge)});
      std::iota(pairs.back().sender.data(), pairs.back().sender.data() + kLarge, pairs.size());
    }
  }
  // Buffers are filled before the ranks run and looked at afterwards. Each rank maps the mailbox
  // elsewhere, so the thread sanitizer does not see what orders the accesses of two ranks to one
  // registered buffer.
  run_ranks(2, [&](Rank& rank) {
    for (Pair& pair : pairs) {
      Request request(rank.rank() == 0 ? DPT_SEND : DPT_RECV, DPT_INT32, kLarge);
      request.root(1 - rank.rank()).input(pair.sender.data()).output(pair.receiver.data());
      rank.run(request);
    }
  });
  for (Pair& pair : pairs) EXPECT_EQ(pair.receiver.values(), pair.sender.values());
}

TEST(PointToPoint, AreCountedAsTheMailboxs) {
  reset_statistics();
  run_ranks(2,
            [](Rank& rank) {
              Values values(kSmall);
              rank.run(rank.rank() == 0 ? send(values, 1) : recv(values, 0));
            },
            {.group = "counted messages"});
  std::vector<dpt_collective> counted;
  for (const StatisticsRow& row : all_statistics()) {
    if (row.group != "counted messages") continue;
    EXPECT_EQ(row.algorithm, AlgorithmName::kMailbox);
    EXPECT_EQ(row.bytes, 4 * kSmall);
    counted.push_back(row.collective);
  }
  EXPECT_THAT(counted, ::testing::UnorderedElementsAre(DPT_SEND, DPT_RECV));
}

// A message of the random test; every rank derives the same list from the seed.
struct Planned {
  int from;
  int to;
  int tag;
  size_t count;
  bool from_any;
};

std::vector<Planned> plan(unsigned seed, int size, int num_messages) {
  std::mt19937 random(seed);
  const size_t sizes[] = {0, 1, 100, 5000, 16384, 16385, 60000, 200000};
  std::vector<Planned> messages;
  for (int i = 0; i < num_messages; ++i) {
    Planned message{};
    message.from = static_cast<int>(random() % size);
    message.to = static_cast<int>((message.from + 1 + random() % (size - 1)) % size);
    // From any rank: under a tag of the sender's, so that the model knows what comes.
    message.from_any = random() % 4 == 0;
    message.tag = message.from_any ? 100 + message.from : static_cast<int>(random() % 3);
    message.count = sizes[random() % std::size(sizes)];
    messages.push_back(message);
  }
  return messages;
}

class PointToPointRandom : public ::testing::TestWithParam<unsigned> {};

TEST_P(PointToPointRandom, MessagesMatchTheModel) {
  constexpr int kSize = 3;
  const std::vector<Planned> messages = plan(GetParam(), kSize, 150);
  run_ranks(kSize, [&](Rank& rank) {
    std::mt19937 random(GetParam() + 77 * rank.rank());
    // Receives in an order of their own, as far as the order within a pair and tag allows.
    std::vector<std::deque<size_t>> lanes;
    std::vector<size_t> sends;
    std::map<std::pair<int, int>, size_t> lane_of;
    for (size_t i = 0; i < messages.size(); ++i) {
      if (messages[i].from == rank.rank()) sends.push_back(i);
      if (messages[i].to != rank.rank()) continue;
      const auto key = std::make_pair(messages[i].from, messages[i].tag);
      if (lane_of.emplace(key, lanes.size()).second) lanes.emplace_back();
      lanes[lane_of[key]].push_back(i);
    }
    std::vector<Values> buffers(messages.size());
    std::vector<int> sources(messages.size(), -1);
    std::vector<Pending> pending;
    size_t next_send = 0;
    for (;;) {
      std::vector<std::deque<size_t>*> open;
      for (auto& lane : lanes) {
        if (!lane.empty()) open.push_back(&lane);
      }
      const bool can_send = next_send < sends.size();
      if (!can_send && open.empty()) break;
      if (can_send && (open.empty() || random() % 2 == 0)) {
        const size_t i = sends[next_send++];
        buffers[i] = numbers(messages[i].count, static_cast<int32_t>(i));
        pending.push_back(rank.start(send(buffers[i], messages[i].to, messages[i].tag)));
        continue;
      }
      auto* const lane = open[random() % open.size()];
      const size_t i = lane->front();
      lane->pop_front();
      buffers[i].resize(messages[i].count);
      pending.push_back(rank.start(messages[i].from_any
                                       ? recv_any(buffers[i], &sources[i], messages[i].tag)
                                       : recv(buffers[i], messages[i].from, messages[i].tag)));
      if (random() % 5 == 0) std::this_thread::yield();
    }
    for (Pending& each : pending) each.get();
    for (size_t i = 0; i < messages.size(); ++i) {
      if (messages[i].to != rank.rank()) continue;
      ASSERT_EQ(buffers[i], numbers(messages[i].count, static_cast<int32_t>(i))) << i;
      if (messages[i].from_any) {
        EXPECT_EQ(sources[i], messages[i].from);
      }
    }
    rank.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Seeds, PointToPointRandom, ::testing::Range(1U, 7U));

class PointToPointMismatch : public ::testing::TestWithParam<size_t> {};

TEST_P(PointToPointMismatch, NamesBothSidesAndLeavesTheGroupUsable) {
  const size_t count = GetParam();
  run_ranks(2, [&](Rank& rank) {
    rank.barrier();
    Values values = numbers(count + rank.rank(), 0);
    const auto both = AllOf(HasSubstr("rank 0 sent " + std::to_string(count) + " x int32"),
                            HasSubstr("rank 1 expected " + std::to_string(count + 1) + " x int32"),
                            HasSubstr("tag 4"));
    if (rank.rank() == 1) {
      const Failure failure = failure_of([&] { rank.run(recv(values, 0, 4)); });
      EXPECT_EQ(failure.status, DPT_ERR_MISMATCH);
      EXPECT_THAT(failure.what(), both);
    } else if (count > kSmall) {
      const Failure failure = failure_of([&] { rank.run(send(values, 1, 4)); });
      EXPECT_EQ(failure.status, DPT_ERR_MISMATCH);
      EXPECT_THAT(failure.what(), both);
    } else {
      rank.run(send(values, 1, 4));  // over before anybody could look at it
    }
    Values good = numbers(kLarge, 3);
    rank.run(rank.rank() == 0 ? send(good, 1, 4) : recv(good, 0, 4));
    rank.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Of, PointToPointMismatch, ::testing::Values(kSmall, kLarge));

TEST(PointToPointMismatches, OfDtypesAreFound) {
  run_ranks(2, [](Rank& rank) {
    Values values = numbers(kSmall, 0);
    if (rank.rank() == 0) return (void)rank.run(send(values, 1));
    Request request = recv(values, 0);
    request.request.dtype = DPT_FLOAT32;
    EXPECT_THAT(failure_of([&] { rank.run(request); }).what(),
                AllOf(HasSubstr("1000 x int32"), HasSubstr("1000 x float32")));
  });
}

TEST(PointToPoint, ToARankOutsideOfTheGroupAreRefused) {
  run_ranks(2, [](Rank& rank) {
    Values values(kSmall);
    const Failure failure = failure_of([&] { rank.run(send(values, 2)); });
    EXPECT_EQ(failure.status, DPT_ERR_INVALID);
    EXPECT_THAT(failure.what(), HasSubstr("peer 2"));
    rank.barrier();
  });
}

TEST(PointToPointTimeout, NamesPeerAndTag) {
  std::promise<void> over;
  std::shared_future<void> is_over = over.get_future().share();
  run_ranks(2,
            [&](Rank& rank) {
              rank.barrier();
              Values values(kLarge);
              if (rank.rank() == 1) {
                Pending waiting = rank.start(recv(values, 0, 5));
                const Failure failure = failure_of([&] { waiting.get(); });
                EXPECT_EQ(failure.status, DPT_ERR_ABORTED);
                EXPECT_THAT(failure.what(), HasSubstr("recv #1"));
                return is_over.wait();
              }
              const Failure failure =
                  failure_of([&] { rank.run(send(values, 1, 6).timeout_ms(200)); });
              EXPECT_EQ(failure.status, DPT_ERR_TIMEOUT);
              EXPECT_THAT(failure.what(),
                          AllOf(HasSubstr("rank 31"), HasSubstr("tag 6"), HasSubstr("200 ms")));
              over.set_value();
              EXPECT_EQ(failure_of([&] { rank.barrier(); }).status, DPT_ERR_ABORTED);
            },
            {.global_ranks = {30, 31}});
}

TEST(PointToPointTimeout, OfAnAsynchronousReceiveFromAnyRank) {
  std::promise<void> over;
  run_ranks(2, [&](Rank& rank) {
    rank.barrier();
    if (rank.rank() == 1) return over.get_future().wait();
    Values values(kSmall);
    int source = -1;
    Pending pending = rank.start(std::move(recv_any(values, &source).timeout_ms(200)));
    const Failure failure = failure_of([&] { pending.get(); });
    EXPECT_EQ(failure.status, DPT_ERR_TIMEOUT);
    EXPECT_THAT(failure.what(), HasSubstr("any rank"));
    over.set_value();
  });
}

TEST(PointToPointTimeout, OfTheFirstOperationNamesWhoDidNotJoin) {
  HashStore store;
  Rank rank(store, 0, 2, {.group = "nobody", .global_ranks = {40, 41}});
  Values values(kSmall);
  const Failure failure = failure_of([&] { rank.run(send(values, 1).timeout_ms(200)); });
  EXPECT_EQ(failure.status, DPT_ERR_TIMEOUT);
  EXPECT_THAT(failure.what(), AllOf(HasSubstr("send"), HasSubstr("rank 41")));
}

TEST(PointToPointLeave, IsToldToWhoStillWaitsAndWhatWasSentStillArrives) {
  run_ranks(3,
            [](Rank& rank) {
              rank.barrier();
              const Values sent = numbers(kSmall, 7);
              if (rank.rank() == 2) {
                rank.run(send(sent, 0));
                return;  // destroyed
              }
              if (rank.rank() == 0) {
                Values values(kSmall);
                rank.run(recv(values, 2));
                EXPECT_EQ(values, sent);
                const Failure failure = failure_of([&] { rank.run(recv(values, 2)); });
                EXPECT_EQ(failure.status, DPT_ERR_PEER_LOST);
                EXPECT_THAT(failure.what(), AllOf(HasSubstr("rank 22"), HasSubstr("left")));
              }
              // The others can still talk.
              Values values = numbers(kLarge, 0);
              rank.run(rank.rank() == 0 ? send(values, 1) : recv(values, 0));
            },
            {.global_ranks = {20, 21, 22}});
}

TEST(PointToPointAbort, EndsWaitsOnEveryRank) {
  run_ranks(2, [](Rank& rank) {
    rank.barrier();
    Values values(kLarge);
    Pending pending = rank.start(recv(values, 1 - rank.rank()));
    if (rank.rank() == 0) rank.abort("the user has had enough");
    const Failure failure = failure_of([&] { pending.get(); });
    EXPECT_EQ(failure.status, DPT_ERR_ABORTED);
    EXPECT_THAT(failure.what(), AllOf(HasSubstr("recv #1"), HasSubstr("the user has had enough")));
  });
}

TEST(PointToPointInterrupt, EndsTheWaitAndTheGroup) {
  HashStore store;
  run_threads(2, [&](int index) {
    std::atomic<bool> pressed = false;
    RankOptions options{.group = "interrupted messages"};
    if (index == 0) options.interrupted = [&] { return pressed.load(); };
    Rank rank(store, index, 2, options);
    rank.barrier();
    pressed = true;
    Values values(kSmall);
    const Failure failure = failure_of([&] { rank.run(recv(values, 1 - index)); });
    EXPECT_EQ(failure.status, index == 0 ? DPT_ERR_INTERRUPTED : DPT_ERR_ABORTED);
    EXPECT_THAT(failure.what(), HasSubstr("interrupted"));
  });
}

TEST(PointToPointThreads, OfOneRankShareAGroup) {
  constexpr int kThreads = 3;
  run_ranks(2, [](Rank& rank) {
    run_threads(kThreads, [&](int tag) {
      for (int round = 0; round < 30; ++round) {
        const size_t count = round % 7 == 0 ? kLarge / 8 : kSmall;
        Values values = numbers(count, tag + round);
        if ((tag + round) % 2 == rank.rank()) {
          rank.run(send(values, 1 - rank.rank(), tag));
        } else {
          values.assign(count, -1);
          rank.run(recv(values, 1 - rank.rank(), tag));
          ASSERT_EQ(values, numbers(count, tag + round));
        }
      }
    });
  });
}

TEST(PointToPointDestroy, WaitsForWhatIsUnderWay) {
  std::vector<Pending> pending[2];
  Values sent = numbers(kLarge, 1);
  Values received(kLarge);
  run_ranks(2, [&](Rank& rank) {
    pending[rank.rank()].push_back(
        rank.start(rank.rank() == 0 ? send(sent, 1) : recv(received, 0)));
  });
  for (auto& of_rank : pending) of_rank[0].get();
  EXPECT_EQ(received, sent);
}

}  // namespace
}  // namespace dpt::testing
