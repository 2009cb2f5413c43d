// More messages at a time than any ring of the mailboxes has room for, matched in any order.
#include <gtest/gtest.h>

#include <utility>

#include "messages.hpp"

namespace dpt::testing {
namespace {

// Messages of one size, each with a tag of its own.
std::vector<Values> many(int number, size_t count, int32_t first) {
  std::vector<Values> all;
  for (int i = 0; i < number; ++i) all.push_back(numbers(count, first + i));
  return all;
}

class ManyMessages : public ::testing::TestWithParam<std::pair<int, size_t>> {};

TEST_P(ManyMessages, AreReceivedInTheOppositeOrder) {
  const auto [number, count] = GetParam();
  run_ranks(3, [number = number, count = count](Rank& rank) {
    // To the next rank and to itself.
    const int next = (rank.rank() + 1) % 3;
    const int before = (rank.rank() + 2) % 3;
    const std::vector<Values> sent = many(number, count, rank.rank());
    std::vector<Pending> pending;
    for (int i = 0; i < number; ++i) {
      pending.push_back(rank.start(send(sent[i], next, i)));
      pending.push_back(rank.start(send(sent[i], rank.rank(), i)));
    }
    for (int i = number - 1; i >= 0; --i) {
      Values values(count);
      rank.run(recv(values, before, i));
      ASSERT_EQ(values, numbers(count, before + i));
      rank.run(recv(values, rank.rank(), i));
      ASSERT_EQ(values, sent[i]);
    }
    for (Pending& each : pending) each.get();
  });
}

TEST_P(ManyMessages, AreReceivedFromAnyRankInTheOppositeOrder) {
  const auto [number, count] = GetParam();
  run_ranks(3, [number = number, count = count](Rank& rank) {
    if (rank.rank() == 0) {
      for (int i = 2 * number - 1; i >= 0; --i) {
        Values values(count);
        int source = -1;
        rank.run(recv_any(values, &source, i / 2));
        ASSERT_EQ(values, numbers(count, source + i / 2));
      }
      return;
    }
    const std::vector<Values> sent = many(number, count, rank.rank());
    std::vector<Pending> pending;
    for (int i = 0; i < number; ++i) pending.push_back(rank.start(send(sent[i], 0, i)));
    for (Pending& each : pending) each.get();
  });
}

TEST_P(ManyMessages, AreWaitedForByThreadsOfTheirOwn) {
  constexpr int kThreads = 4;
  const auto [number, count] = GetParam();
  run_ranks(2, [number = number, count = count](Rank& rank) {
    const int peer = 1 - rank.rank();
    const std::vector<Values> sent = many(number, count, rank.rank());
    std::vector<Pending> pending;
    for (int i = 0; i < number; ++i) pending.push_back(rank.start(send(sent[i], peer, i)));
    run_threads(kThreads, [&](int thread) {
      for (int i = number - 1 - thread; i >= 0; i -= kThreads) {
        Values values(count);
        rank.run(recv(values, peer, i));
        ASSERT_EQ(values, numbers(count, peer + i));
      }
    });
    for (Pending& each : pending) each.get();
  });
}

// Past the mailbox's replies, and past its letters.
INSTANTIATE_TEST_SUITE_P(Of,
                         ManyMessages,
                         ::testing::Values(std::pair{17, size_t{20000}},
                                           std::pair{100, size_t{16385}},
                                           std::pair{5000, size_t{20}}));

}  // namespace
}  // namespace dpt::testing
