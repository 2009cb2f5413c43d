// Registered memory: the allocator against a model, and the ways in which peers reach it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "base/error.hpp"
#include "comm/fabric.hpp"
#include "rank_threads.hpp"
#include "transport/shm/memory_pool.hpp"
#include "transport/shm/peer_pools.hpp"
#include "units.hpp"

namespace dpt::testing {
namespace {

using ::testing::HasSubstr;

UniqueFd duplicate(int fd) { return UniqueFd(DPT_SYS_CHECK(fcntl(fd, F_DUPFD_CLOEXEC, 0))); }

size_t bytes_in_memory(int fd) {
  struct stat info{};
  DPT_SYS_CHECK(fstat(fd, &info));
  return static_cast<size_t>(info.st_blocks) * 512;
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(MemoryPool, HandsOutDisjointAlignedBlocksInAnyOrder) {
  MemoryPool pool(64 * kMiB);
  std::mt19937 random(7);
  std::map<char*, size_t> model;
  size_t in_use = 0;
  const auto rounded = [](size_t bytes) { return (std::max<size_t>(bytes, 1) + 255) / 256 * 256; };
  for (int step = 0; step < 4000; ++step) {
    if (model.empty() || random() % 5 < 3) {
      const size_t bytes = random() % 3 == 0 ? random() % 8 : random() % 40000;
      auto* const block = static_cast<char*>(pool.allocate(bytes));
      ASSERT_EQ(reinterpret_cast<uintptr_t>(block) % 256, 0U);
      const auto next = model.lower_bound(block);
      if (next != model.end()) {
        ASSERT_LE(block + rounded(bytes), next->first);
      }
      if (next != model.begin()) {
        const auto previous = std::prev(next);
        ASSERT_LE(previous->first + rounded(previous->second), block);
      }
      ASSERT_EQ(pool.offset_of(block, bytes), static_cast<uint64_t>(block - pool.base()));
      std::memset(block, static_cast<int>(bytes), bytes);
      model[block] = bytes;
      in_use += rounded(bytes);
    } else {
      const auto chosen = std::next(model.begin(), static_cast<long>(random() % model.size()));
      const auto [block, bytes] = *chosen;
      for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(block[i], static_cast<char>(bytes));
      pool.free(block);
      model.erase(chosen);
      in_use -= rounded(bytes);
    }
    ASSERT_EQ(pool.usage().in_use_bytes, in_use);
  }
  for (const auto& [block, bytes] : model) pool.free(block);
  EXPECT_EQ(pool.usage().in_use_bytes, 0U);
  // All merged again: the whole is one block.
  EXPECT_EQ(pool.allocate(64 * kMiB), pool.base());
}

TEST(MemoryPool, MergesWithBothNeighbours) {
  MemoryPool pool(kMiB);
  void* const first = pool.allocate(kMiB / 4);
  void* const second = pool.allocate(kMiB / 4);
  void* const third = pool.allocate(kMiB / 2);
  pool.free(first);
  pool.free(third);
  EXPECT_THROW(pool.allocate(kMiB), Error);
  pool.free(second);
  EXPECT_EQ(pool.allocate(kMiB), first);
}

TEST(MemoryPool, PrefersTheSmallestBlockThatFits) {
  MemoryPool pool(kMiB);
  void* const large = pool.allocate(8192);
  void* const wall = pool.allocate(256);
  void* const small = pool.allocate(1024);
  void* const end = pool.allocate(256);
  pool.free(large);
  pool.free(small);
  EXPECT_EQ(pool.allocate(1000), small);
  EXPECT_EQ(pool.allocate(1025), large);
  pool.free(wall);
  pool.free(end);
}

TEST(MemoryPool, KnowsWhatLiesInIt) {
  MemoryPool pool(kMiB);
  const std::vector<char> outside(100);
  EXPECT_FALSE(pool.offset_of(outside.data(), 0)) << "before the first allocation";
  auto* const block = static_cast<char*>(pool.allocate(1000));
  EXPECT_EQ(pool.offset_of(block + 10, 500), static_cast<uint64_t>(block + 10 - pool.base()));
  EXPECT_FALSE(pool.offset_of(outside.data(), outside.size()));
  EXPECT_FALSE(pool.offset_of(nullptr, 0));
  EXPECT_FALSE(pool.offset_of(block, kMiB + 1)) << "reaches beyond the end";
  EXPECT_FALSE(pool.offset_of(pool.base() + kMiB, 0));
  EXPECT_FALSE(pool.offset_of(block, SIZE_MAX));
}

TEST(MemoryPool, SaysWhatIsWrong) {
  MemoryPool pool(kMiB);
  void* const block = pool.allocate(kMiB / 2);
  const std::string exhausted = message_of([&] { pool.allocate(kMiB); });
  EXPECT_THAT(exhausted, HasSubstr("registered memory is exhausted: 1048576 bytes"));
  EXPECT_THAT(exhausted, HasSubstr("0 MiB of 1 MiB in use"));
  EXPECT_THAT(message_of([&] { pool.allocate(SIZE_MAX); }), HasSubstr("exhausted"));
  int foreign = 0;
  EXPECT_THAT(message_of([&] { pool.free(&foreign); }), HasSubstr("not allocated"));
  EXPECT_THAT(message_of([&] { pool.free(static_cast<char*>(block) + 256); }),
              HasSubstr("not allocated"));
  pool.free(block);
  EXPECT_THAT(message_of([&] { pool.free(block); }), HasSubstr("not allocated"));
}

TEST(MemoryPool, ServesThreads) {
  MemoryPool pool(64 * kMiB);
  run_threads(4, [&](int index) {
    std::mt19937 random(index);
    std::vector<std::pair<char*, size_t>> blocks;
    for (int step = 0; step < 2000; ++step) {
      if (blocks.size() < 20) {
        const size_t bytes = 1 + random() % 5000;
        auto* const block = static_cast<char*>(pool.allocate(bytes));
        block[0] = static_cast<char>(index);
        block[bytes - 1] = static_cast<char>(index);
        blocks.emplace_back(block, bytes);
      } else {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        const auto [block, bytes] = blocks.back();
        ASSERT_TRUE(pool.offset_of(block, bytes));
        ASSERT_EQ(block[0], static_cast<char>(index));
        ASSERT_EQ(block[bytes - 1], static_cast<char>(index));
        pool.free(block);
        blocks.pop_back();
      }
    }
    for (const auto& [block, bytes] : blocks) pool.free(block);
  });
  EXPECT_EQ(pool.usage().in_use_bytes, 0U);
}

TEST(MemoryPool, HoldsPagesOnlyOfWhatWasWrittenAndUntilTrimmed) {
  MemoryPool pool(1024 * kMiB);
  const int file = pool.file();
  EXPECT_EQ(bytes_in_memory(file), 0U);
  auto* const kept = static_cast<char*>(pool.allocate(4 * kMiB));
  auto* const freed = static_cast<char*>(pool.allocate(16 * kMiB));
  std::memset(kept, 1, 4 * kMiB);
  std::memset(freed, 2, 16 * kMiB);
  pool.free(freed);
  EXPECT_GE(bytes_in_memory(file), 20 * kMiB) << "kept for the next one";
  EXPECT_EQ(pool.allocate(16 * kMiB), freed);
  EXPECT_EQ(pool.trim(), 0U);
  pool.free(freed);
  EXPECT_EQ(pool.trim(), 16 * kMiB);
  EXPECT_LE(bytes_in_memory(file), 6 * kMiB);
  EXPECT_EQ(kept[4 * kMiB - 1], 1);
  EXPECT_EQ(pool.usage().reserved_bytes, 20 * kMiB);
}

TEST(PeerPools, MapAFileOnceAndOnlyWhileItIsShared) {
  MemoryPool pool(64 * kMiB);
  auto* const block = static_cast<char*>(pool.allocate(1000));
  PeerPools peers;
  auto first = peers.map(duplicate(pool.file()));
  const auto second = peers.map(duplicate(pool.file()));
  EXPECT_EQ(first, second);
  EXPECT_NE(first->base(), pool.base());
  MemoryPool other(kMiB);
  EXPECT_NE(peers.map(duplicate(other.file())), first);
  EXPECT_EQ(peers.size(), 1U) << "nobody holds the other one";

  char* const seen_by_peer = first->base() + *pool.offset_of(block, 1000);
  block[7] = 42;
  EXPECT_EQ(seen_by_peer[7], 42);
  seen_by_peer[8] = 43;
  EXPECT_EQ(block[8], 43);
  first.reset();
  EXPECT_EQ(peers.size(), 1U);
}

TEST(PeerPools, ReachBetweenProcesses) {
  MemoryPool pool(64 * kMiB);
  auto* const block = static_cast<char*>(pool.allocate(1000));
  const uint64_t offset = *pool.offset_of(block, 1000);
  block[0] = 1;
  const pid_t child = fork();
  if (child == 0) {
    int wrong = 1;
    try {
      PeerPools peers;
      const auto parent = peers.map(duplicate(pool.file()));
      wrong = parent->base()[offset] == 1 ? 0 : 1;
      parent->base()[offset + 999] = 2;
    } catch (const std::exception&) {
    }
    _exit(wrong);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(block[999], 2);
}

TEST(MemoryPool, IsReadableInAForkedChildAndNothingElse) {
  MemoryPool pool(64 * kMiB);
  auto* const block = static_cast<char*>(pool.allocate(1000));
  block[5] = 6;
  const int file = pool.file();
  const pid_t child = fork();
  if (child == 0) {
    pool.after_fork();
    int wrong = block[5] == 6 ? 0 : 1;
    pool.free(block);
    pool.free(block);  // nor is it taken for a double free
    if (fcntl(file, F_GETFD) != -1) wrong |= 2;
    if (message_of([&] { pool.allocate(8); }).find("spawn") == std::string::npos) wrong |= 4;
    if (!pool.offset_of(block, 1000)) wrong |= 8;
    _exit(wrong);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_GE(pool.usage().in_use_bytes, 1000U);
  pool.free(block);
}

TEST(RegisteredMemory, IsTheProcessesAndReachesItsGroups) {
  MemoryPool& pool = Fabric::instance().memory();
  const size_t before = pool.usage().in_use_bytes;
  run_ranks(3, [&](Rank& rank) {
    constexpr size_t kCount = 30000;
    auto* const values = static_cast<float*>(pool.allocate(kCount * sizeof(float)));
    for (int round = 0; round < 3; ++round) {
      std::fill_n(values, kCount, static_cast<float>(rank.rank() + round));
      Request sum(DPT_ALL_REDUCE, DPT_FLOAT32, kCount);
      rank.run(sum.reduce_op(DPT_SUM).input(values).output(values));
      for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(values[i], static_cast<float>(3 + 3 * round));
    }
    pool.free(values);
  });
  EXPECT_EQ(pool.usage().in_use_bytes, before);
  EXPECT_EQ(Fabric::instance().peer_pools().size(), 0U) << "threads share their process's own";
}

}  // namespace
}  // namespace dpt::testing
