// A process that has left all its groups keeps nothing of them: no thread, and no file but the
// flight record.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <filesystem>
#include <map>
#include <string>
#include <thread>

#include "comm/fabric.hpp"
#include "comm/flight_record.hpp"
#include "comm/invitations.hpp"
#include "rank_threads.hpp"
#include "transport/tcp/connection.hpp"

namespace dpt::testing {
namespace {

size_t threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

// A thread that was joined may be in the list for a moment.
size_t threads_without_more_than(size_t wanted) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (threads() > wanted && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return threads();
}

std::map<std::string, std::string> files() {
  std::map<std::string, std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // that of the iterator itself
    const std::string name = std::filesystem::read_symlink(entry.path(), gone);
    if (!gone) found[entry.path()] = name;
  }
  return found;
}

void use(Rank& rank) {
  std::vector<float> values(50000, 1.0F);
  Request sum(DPT_ALL_REDUCE, DPT_FLOAT32, values.size());
  rank.run(sum.reduce_op(DPT_SUM).input(values.data()).output(values.data()));
  EXPECT_EQ(values[0], 3.0F);
  Request later(DPT_ALL_REDUCE, DPT_FLOAT32, values.size());
  later.reduce_op(DPT_SUM).input(values.data()).output(values.data());
  rank.start(std::move(later)).get();
  auto* const registered = static_cast<float*>(Fabric::instance().memory().allocate(4000));
  std::fill_n(registered, 1000, 1.0F);
  Request in_place(DPT_ALL_REDUCE, DPT_FLOAT32, 1000);
  rank.run(in_place.reduce_op(DPT_SUM).input(registered).output(registered));
  Fabric::instance().memory().free(registered);
}

TEST(Leaving, TheLastGroupEndsThreadsAndFiles) {
  FlightRecord::instance();
  const size_t threads_before = threads();
  const auto files_before = files();
  for (int round = 0; round < 3; ++round) {
    run_ranks(3, use);
    EXPECT_EQ(threads_without_more_than(threads_before), threads_before) << "round " << round;
    EXPECT_EQ(files(), files_before) << "round " << round;
  }
}

TEST(Leaving, RegisteredMemoryStaysAsLongAsItIsUsed) {
  MemoryPool& pool = Fabric::instance().memory();
  float* kept = nullptr;
  run_ranks(2, [&](Rank& rank) {
    std::vector<float> values(100, 1.0F);
    Request sum(DPT_ALL_REDUCE, DPT_FLOAT32, values.size());
    rank.run(sum.reduce_op(DPT_SUM).input(values.data()).output(values.data()));
    if (rank.rank() != 0) return;
    kept = static_cast<float*>(pool.allocate(sizeof(float)));
    *kept = 7.0F;
  });
  ASSERT_NE(pool.base(), nullptr);
  EXPECT_EQ(*kept, 7.0F);
  pool.free(kept);
  EXPECT_EQ(pool.base(), nullptr);
  EXPECT_EQ(pool.usage().reserved_bytes, 0U);
}

TEST(Leaving, APeersNextPoolIsNotTakenForTheOneBefore) {
  MemoryPool pool(1 << 20);
  PeerPools peers;
  const auto duplicate = [&] { return UniqueFd(dup(pool.file())); };
  auto hold = pool.hold();
  const auto before = peers.map(duplicate());
  hold.reset();
  hold = pool.hold();
  auto* const block = static_cast<char*>(pool.allocate(100));
  const auto after = peers.map(duplicate());
  ASSERT_NE(before, after);
  block[5] = 42;
  EXPECT_EQ(after->base()[*pool.offset_of(block, 1) + 5], 42);
  pool.free(block);
}

TEST(Leaving, InvitationsListenOnlyWhileOneIsOpen) {
  const size_t threads_before = threads();
  HashStore store;
  Invitations& invitations = Invitations::instance();
  std::atomic<int> invited = 0;
  for (int round = 0; round < 3; ++round) {
    const std::string one = invitations.open([&](const std::string&) { ++invited; }, store);
    const std::string two = invitations.open([&](const std::string&) { ++invited; }, store);
    invitations.close(one);
    EXPECT_EQ(threads(), threads_before + 1);
    const int wanted = invited + 1;
    while (invited < wanted) {
      invitations.send(two, two);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    invitations.close(two);
    EXPECT_EQ(threads_without_more_than(threads_before), threads_before);
  }
}

TEST(Leaving, TheReactorEndsWithTheLastSocket) {
  const size_t threads_before = threads();
  static auto* const reactor = new Reactor;  // a thread that has just ended may still look
  for (int round = 0; round < 3; ++round) {
    int ends[2];
    DPT_SYS_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
    std::atomic<bool> told = false;
    UniqueFd own(ends[0]);
    UniqueFd peer(ends[1]);
    const uint64_t id = reactor->add(own.get(), [&](uint32_t) { told = true; }, nullptr);
    reactor->watch(id, own.get(), EPOLLIN);
    DPT_SYS_CHECK(write(peer.get(), "x", 1));
    while (!told) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(threads(), threads_before + 1);
    reactor->remove(id, own.get());
    std::vector<UniqueFd> ended;
    ended.push_back(std::move(own));
    peer.reset();
    reactor->linger(std::move(ended));
    EXPECT_EQ(threads_without_more_than(threads_before), threads_before);
  }
}

}  // namespace
}  // namespace dpt::testing
