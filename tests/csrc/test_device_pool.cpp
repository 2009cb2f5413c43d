// Registered device memory without a device: what processes tell each other of their chunks, with
// memory files in the place of CUDA's. Each "process" is an object with a thread of its own.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <cstring>
#include <random>
#include <thread>

#include "base/error.hpp"
#include "fake_chunk_memory.hpp"
#include "rank_threads.hpp"
#include "transport/shm/pool_links.hpp"

namespace dpt::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kPage = 4096;
constexpr size_t kPages = 256;
constexpr size_t kCapacity = kPages * kPage;
constexpr std::chrono::milliseconds kGrace{100};
constexpr std::chrono::seconds kPatience{20};

class Process {
 public:
  explicit Process(const std::shared_ptr<FakeChunkDevices>& devices,
                   std::chrono::milliseconds grace = kGrace)
      : grace_(grace), memory(new FakeChunkMemory(devices)), links(take(memory)) {}

  ChunkPool& pool(int device = 0) { return links.pool({device, kCapacity, kPage, grace_}); }
  char* allocate(size_t pages, char content) {
    char* const made = pool().allocate(pages * kPage);
    if (made != nullptr) std::memset(made, content, pages * kPage);
    return made;
  }

 private:
  const std::chrono::milliseconds grace_;
  static std::unique_ptr<ChunkMemory> take(FakeChunkMemory* memory) {
    return std::unique_ptr<ChunkMemory>(memory);
  }

 public:
  FakeChunkMemory* const memory;
  PoolLinks links;
};

// A rank of a group: its process, and the device it uses.
struct Place {
  Process* process;
  int device = 0;
};

std::vector<PoolLinks::Joined> join(const std::vector<Place>& ranks) {
  const int size = static_cast<int>(ranks.size());
  std::vector<PoolLinks::Joined> joined(ranks.size());
  std::vector<std::string> words(ranks.size());
  std::barrier meeting(size);
  run_threads(size, [&](int rank) {
    const auto all_gather = [&](const std::string& mine) {
      EXPECT_LE(mine.size(), PoolLinks::kMostWords);
      words[rank] = mine;
      meeting.arrive_and_wait();
      const std::vector<std::string> all = words;
      meeting.arrive_and_wait();
      return all;
    };
    const WaitContext wait{Deadline(std::chrono::seconds(10)), [] { return "a test"; }, {}};
    const auto pool = [&]() -> ChunkPool& { return ranks[rank].process->pool(ranks[rank].device); };
    joined[rank] = ranks[rank].process->links.join({rank, size, pool, all_gather, wait});
  });
  return joined;
}

bool eventually(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

bool gets_shared(Process& owner, const char* address, size_t pages, int device = 0) {
  return eventually([&] { return owner.pool(device).is_shared(address, pages * kPage); });
}

// The place at which a rank sees what the owner has at `address`.
char* seen(const PoolLinks::Joined& by, int owner_rank, Process& owner, const char* address) {
  return by.bases.at(owner_rank) + (address - owner.pool().base());
}

TEST(ChunkPool, AloneSharesWithNobodyAndSoAtOnce) {
  const auto devices = std::make_shared<FakeChunkDevices>();
  Process alone(devices);
  char outside = 0;
  EXPECT_EQ(alone.pool().base(), nullptr);
  EXPECT_FALSE(alone.pool().is_shared(&outside, 1)) << "before the first need";
  char* const chunk = alone.allocate(2, 1);
  ASSERT_NE(chunk, nullptr);
  EXPECT_TRUE(alone.pool().is_shared(chunk, 2 * kPage));
  EXPECT_TRUE(alone.pool().is_shared(chunk + 5, 0));
  EXPECT_FALSE(alone.pool().is_shared(chunk, 2 * kPage + 1));
  EXPECT_FALSE(alone.pool().is_shared(chunk + kPage, SIZE_MAX));
  EXPECT_FALSE(alone.pool().is_shared(nullptr, 0));
  EXPECT_FALSE(alone.pool().is_shared(&outside, 1));
  char* const neighbour = alone.allocate(1, 2);
  EXPECT_EQ(neighbour, chunk + 2 * kPage);
  EXPECT_TRUE(alone.pool().is_shared(chunk + 17, 3 * kPage - 17)) << "across both";
  EXPECT_EQ(alone.pool().usage().chunk_bytes, 3 * kPage);
  EXPECT_EQ(alone.pool().usage().shared_bytes, 3 * kPage);
  alone.pool().free(chunk);
  EXPECT_FALSE(alone.pool().is_shared(chunk, 1));
  EXPECT_TRUE(alone.pool().is_shared(neighbour, kPage));
  EXPECT_EQ(devices->used(), kPage);
  EXPECT_EQ(alone.memory->synchronized, 1);
  alone.pool().free(chunk);
  alone.pool().free(&outside);
  EXPECT_EQ(devices->used(), kPage) << "what is no chunk is left alone";
}

TEST(ChunkPool, EndsWithTheDeviceAndWithTheRange) {
  Process small(std::make_shared<FakeChunkDevices>(5 * kPage));
  EXPECT_EQ(small.pool().allocate(6 * kPage), nullptr);
  char* const chunk = small.allocate(3, 1);
  EXPECT_EQ(small.allocate(3, 1), nullptr);
  small.pool().free(chunk);
  EXPECT_EQ(small.allocate(5, 1), chunk) << "nothing is lost by a failure";

  Process large(std::make_shared<FakeChunkDevices>());
  EXPECT_EQ(large.pool().allocate(SIZE_MAX), nullptr);
  EXPECT_EQ(large.pool().allocate(kCapacity + 1), nullptr);
  char* const whole = large.allocate(kPages, 1);
  ASSERT_NE(whole, nullptr);
  EXPECT_EQ(large.allocate(1, 1), nullptr);
}

TEST(ChunkPool, SaysWhyThereIsNoSuchMemory) {
  Process process(std::make_shared<FakeChunkDevices>());
  process.memory->cant_reserve = true;
  EXPECT_THROW(process.pool().allocate(kPage), Error);
  process.memory->cant_reserve = false;
  EXPECT_NE(process.pool().allocate(kPage), nullptr);
}

TEST(PoolLinks, ShowChunksToAllPeersAtFixedAddresses) {
  const auto devices = std::make_shared<FakeChunkDevices>();
  Process a(devices), b(devices), c(devices);
  const auto joined = join({{&a}, {&b}, {&c}});
  for (const auto& each : joined) {
    ASSERT_EQ(each.bases.size(), 3U) << each.why_not;
    EXPECT_THAT(each.bases, Each(::testing::NotNull()));
  }
  EXPECT_EQ(joined[1].bases[1], b.pool().base());
  EXPECT_EQ(a.links.size(), 2U);
  char* const of_a = a.allocate(3, 11);
  char* const of_b = b.allocate(1, 22);
  ASSERT_TRUE(gets_shared(a, of_a, 3));
  ASSERT_TRUE(gets_shared(b, of_b, 1));
  EXPECT_EQ(seen(joined[1], 0, a, of_a)[3 * kPage - 1], 11);
  EXPECT_EQ(seen(joined[2], 0, a, of_a)[0], 11);
  EXPECT_EQ(seen(joined[0], 1, b, of_b)[7], 22);
  seen(joined[2], 1, b, of_b)[8] = 23;
  EXPECT_EQ(of_b[8], 23);
}

TEST(PoolLinks, BringLatecomersWhatIsThere) {
  const auto devices = std::make_shared<FakeChunkDevices>();
  Process a(devices), b(devices), c(devices);
  char* const early = a.allocate(2, 1);
  EXPECT_TRUE(a.pool().is_shared(early, kPage));
  const auto first = join({{&a}, {&b}});
  ASSERT_TRUE(gets_shared(a, early, 2));
  EXPECT_EQ(seen(first[1], 0, a, early)[100], 1);

  c.memory->stop(true);
  const auto second = join({{&c}, {&a}});
  EXPECT_FALSE(a.pool().is_shared(early, kPage)) << "not with everybody yet";
  EXPECT_EQ(a.pool().usage().shared_bytes, 0U);
  EXPECT_EQ(seen(first[1], 0, a, early)[100], 1);
  c.memory->stop(false);
  ASSERT_TRUE(gets_shared(a, early, 2));
  EXPECT_EQ(seen(second[0], 1, a, early)[100], 1);

  // Links and addresses of the first group serve the next one of the same processes.
  const auto third = join({{&b}, {&a}});
  EXPECT_EQ(third[0].bases[1], first[1].bases[0]);
  EXPECT_EQ(b.links.size(), 1U);
  EXPECT_TRUE(a.pool().is_shared(early, 2 * kPage));
}

TEST(PoolLinks, FreeWhenAllHaveUnmapped) {
  const auto devices = std::make_shared<FakeChunkDevices>(4 * kPage);
  Process a(devices, kPatience), b(devices), c(devices);
  const auto joined = join({{&a}, {&b}, {&c}});
  for (int round = 0; round < 20; ++round) {
    char* const chunk = a.allocate(3, static_cast<char>(round));
    ASSERT_NE(chunk, nullptr) << "what was freed is there for the next at once";
    EXPECT_EQ(chunk, a.pool().base());
    if (round % 2 == 0) {
      ASSERT_TRUE(gets_shared(a, chunk, 3));
      EXPECT_EQ(seen(joined[1 + round % 3 / 2], 0, a, chunk)[5], round);
    }
    a.pool().free(chunk);
    EXPECT_EQ(devices->used(), 0U);
    EXPECT_FALSE(a.pool().is_shared(chunk, 1));
  }
}

TEST(PoolLinks, DontWaitTwiceForWhoDoesNotAnswer) {
  const auto devices = std::make_shared<FakeChunkDevices>();
  Process a(devices), b(devices);
  const auto joined = join({{&a}, {&b}});
  b.memory->stop(true);
  char* const first = a.allocate(1, 1);
  char* const second = a.allocate(1, 2);
  const auto begin = std::chrono::steady_clock::now();
  a.pool().free(first);
  const auto waited = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(waited, kGrace);
  a.pool().free(second);
  EXPECT_EQ(a.pool().usage().chunk_bytes, 0U);
  EXPECT_EQ(a.allocate(1, 3), a.pool().base() + 2 * kPage) << "the offsets are still taken";
  b.memory->stop(false);
  ASSERT_TRUE(eventually([&] { return devices->used() == kPage; }));
  ASSERT_TRUE(eventually([&] {
    char* const made = a.allocate(2, 4);
    if (made == a.pool().base()) return true;
    a.pool().free(made);
    return false;
  }));
  ASSERT_TRUE(gets_shared(a, a.pool().base(), 3));
  EXPECT_EQ(joined[1].bases[0][kPage], 4);
}

TEST(PoolLinks, LeaveWhatAPeerRefusesUnshared) {
  const auto devices = std::make_shared<FakeChunkDevices>();
  Process a(devices, kPatience), b(devices), c(devices);
  const auto joined = join({{&a}, {&b}, {&c}});
  b.memory->cant_import = true;
  char* const refused = a.allocate(1, 1);
  char* const of_b = b.allocate(1, 2);
  ASSERT_TRUE(gets_shared(b, of_b, 1)) << "the others map what it has";
  b.memory->cant_import = false;
  char* const taken = a.allocate(1, 3);
  ASSERT_TRUE(gets_shared(a, taken, 1));
  EXPECT_FALSE(a.pool().is_shared(refused, 1));
  EXPECT_EQ(a.pool().usage().shared_bytes, kPage);
  a.pool().free(refused);
  EXPECT_EQ(a.allocate(1, 4), refused);
  ASSERT_TRUE(gets_shared(a, refused, 2)) << "together with its neighbour";
  EXPECT_EQ(seen(joined[1], 0, a, refused)[0], 4);
}

TEST(PoolLinks, LeaveWhatCantBeExportedUnshared) {
  const auto devices = std::make_shared<FakeChunkDevices>();
  Process a(devices, kPatience), b(devices);
  const auto joined = join({{&a}, {&b}});
  a.memory->cant_export = true;
  char* const kept = a.allocate(1, 1);
  EXPECT_FALSE(a.pool().is_shared(kept, 1));
  a.memory->cant_export = false;
  char* const given = a.allocate(1, 1);
  ASSERT_TRUE(gets_shared(a, given, 1));
  EXPECT_FALSE(a.pool().is_shared(kept, 1));
  a.pool().free(kept);
  EXPECT_EQ(devices->used(), kPage);
  EXPECT_EQ(a.allocate(1, 1), kept);
}

TEST(PoolLinks, GoOnWithoutWhoDied) {
  const auto devices = std::make_shared<FakeChunkDevices>();
  Process a(devices, kPatience), b(devices);
  auto dies = std::make_unique<Process>(devices);
  auto joined = join({{&a}, {&b}, {dies.get()}});
  char* const of_dead = dies->allocate(1, 9);
  ASSERT_TRUE(gets_shared(*dies, of_dead, 1));
  const char* const still_there = seen(joined[0], 2, *dies, of_dead);
  dies->memory->stop(true);
  char* const chunk = a.allocate(1, 1);
  char* const freed = a.allocate(1, 2);
  std::thread frees([&] { a.pool().free(freed); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(a.pool().is_shared(chunk, 1));
  std::thread leaves([&] { joined[2] = {}; });  // which waits for what the driver has begun
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  dies->memory->stop(false);
  leaves.join();
  dies.reset();
  frees.join();
  ASSERT_TRUE(gets_shared(a, chunk, 1));
  ASSERT_TRUE(eventually([&] { return a.links.size() == 1 && b.links.size() == 1; }));
  EXPECT_EQ(still_there[0], 9) << "as long as a group uses it";
  EXPECT_EQ(joined[1].bases[0][chunk - a.pool().base()], 1);
  joined[0] = joined[1] = {};
  EXPECT_TRUE(eventually([&] { return devices->used() == kPage; }));
}

// A link ends by the other process's death alone; who lives and fails at it keeps it open.
TEST(PoolLink, TellsADeathFromAFailure) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  PoolLink link("peer", UniqueFd(ends[0]), [] {});
  UniqueFd peer(ends[1]);
  UniqueFd file;
  EXPECT_FALSE(link.receive(&file));
  send_fds(peer, "nonsense", {});
  EXPECT_THROW(link.receive(&file), Error);
  EXPECT_FALSE(link.has_ended());
  link.set_broken("a test");
  EXPECT_TRUE(link.is_broken());
  EXPECT_TRUE(link.is_late()) << "nobody waits for it";
  link.post({ChunkMessage::kDrop, 0, 1, 2, 3});
  EXPECT_TRUE(link.flush());
  peer.reset();
  EXPECT_TRUE(link.has_ended());
  link.post({ChunkMessage::kDrop, 0, 1, 2, 3});
  EXPECT_THROW(link.flush(), Error);
}

// More messages than a socket holds.
TEST(PoolLinks, KeepWhatCantBeSentAtOnce) {
  const auto devices = std::make_shared<FakeChunkDevices>();
  Process a(devices, std::chrono::milliseconds(1)), b(devices);
  const auto joined = join({{&a}, {&b}});
  b.memory->stop(true);
  std::vector<char*> chunks;
  for (int i = 0; i < 200; ++i) chunks.push_back(a.allocate(1, static_cast<char>(i)));
  for (char* const chunk : chunks) a.pool().free(chunk);
  char* const last = a.allocate(1, 42);
  ASSERT_NE(last, nullptr);
  b.memory->stop(false);
  ASSERT_TRUE(gets_shared(a, last, 1));
  EXPECT_EQ(seen(joined[1], 0, a, last)[0], 42);
  EXPECT_EQ(devices->used(), kPage);
}

TEST(PoolLinks, AgreeOnWhetherThereIsAny) {
  const auto devices = std::make_shared<FakeChunkDevices>();
  Process a(devices), b(devices), c(devices);
  b.memory->cant_reserve = true;
  for (const auto& each : join({{&a}, {&b}, {&c}})) {
    EXPECT_THAT(each.bases, IsEmpty());
    EXPECT_THAT(each.why_not, HasSubstr("rank 1 of the group: this fake driver reserves nothing"));
  }
  EXPECT_EQ(a.links.size() + b.links.size() + c.links.size(), 0U);
  char* const chunk = a.allocate(1, 1);
  EXPECT_TRUE(a.pool().is_shared(chunk, 1)) << "nobody has to map it";
  b.memory->cant_reserve = false;
  const auto joined = join({{&a}, {&b}, {&c}});
  ASSERT_TRUE(gets_shared(a, chunk, 1));
  EXPECT_EQ(seen(joined[1], 0, a, chunk)[0], 1);

  // A range of its own it has by now; it's the peer's that it can't reserve.
  Process d(devices);
  d.pool().prepare();
  d.memory->cant_reserve = true;
  for (const auto& each : join({{&a}, {&d}})) EXPECT_THAT(each.why_not, HasSubstr("rank 1"));
  EXPECT_TRUE(a.pool().is_shared(chunk, 1));
}

TEST(PoolLinks, ServeSeveralRanksAndDevicesOfAProcess) {
  const auto devices = std::make_shared<FakeChunkDevices>();
  Process a(devices, kPatience), b(devices);
  char* const early = a.pool(1).allocate(kPage);
  early[0] = 1;
  const auto joined = join({{&a, 0}, {&a, 1}, {&b, 0}, {&b, 1}});
  ASSERT_EQ(joined[3].bases.size(), 4U) << joined[3].why_not;
  EXPECT_EQ(a.links.size(), 1U);
  EXPECT_EQ(joined[0].bases[1], a.pool(1).base());
  EXPECT_THAT(a.memory->devices_at(early), ElementsAre(1, 0));
  ASSERT_TRUE(gets_shared(a, early, 1, 1));
  char* const there = joined[2].bases[1] + (early - a.pool(1).base());
  EXPECT_EQ(there[0], 1);
  EXPECT_THAT(b.memory->devices_at(there), ::testing::UnorderedElementsAre(0, 1));

  // A device that comes later may use what is mapped already.
  const auto later = join({{&b, 2}, {&a, 1}});
  EXPECT_EQ(later[0].bases[1], joined[2].bases[1]);
  EXPECT_THAT(b.memory->devices_at(there), ::testing::UnorderedElementsAre(0, 1, 2));
  a.pool(1).free(early);
  EXPECT_EQ(devices->used(), 0U);
}

TEST(PoolLinks, MeetInSeveralGroupsAtTheSameTime) {
  const auto devices = std::make_shared<FakeChunkDevices>();
  Process a(devices, kPatience), b(devices), c(devices);
  char* const chunk = a.allocate(1, 1);
  std::vector<std::vector<PoolLinks::Joined>> joined(4);
  run_threads(4, [&](int group) {
    joined[group] = group % 2 == 0 ? join({{&a}, {&b}, {&c}}) : join({{&c}, {&b}, {&a}});
  });
  ASSERT_TRUE(gets_shared(a, chunk, 1));
  for (int group = 0; group < 4; ++group) {
    const int owner = group % 2 == 0 ? 0 : 2;
    for (const auto& each : joined[group]) {
      ASSERT_EQ(each.bases.size(), 3U) << each.why_not;
      EXPECT_EQ(each.bases[owner][0], 1);
    }
  }
  a.pool().free(chunk);
  EXPECT_EQ(devices->used(), 0U) << "however often it was offered";
}

TEST(PoolLinks, ClosesWhatAForkedChildInherits) {
  const auto devices = std::make_shared<FakeChunkDevices>();
  Process a(devices), b(devices);
  const auto joined = join({{&a}, {&b}});
  char* const chunk = a.allocate(1, 1);
  ASSERT_TRUE(gets_shared(a, chunk, 1));
  const auto count_descriptors = [] {
    int open = 0;
    for (int fd = 0; fd < 256; ++fd) open += fcntl(fd, F_GETFD) != -1;
    return open;
  };
  const pid_t child = fork();
  if (child == 0) {
    const int before = count_descriptors();
    a.links.after_fork();
    int wrong = count_descriptors() == before - 2 ? 0 : 1;  // a link, and what wakes the thread
    if (a.pool().is_shared(chunk, 1)) wrong |= 2;
    if (a.pool().allocate(kPage) != nullptr) wrong |= 4;
    a.pool().free(chunk);
    _exit(wrong);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(a.pool().is_shared(chunk, 1));
  EXPECT_EQ(a.links.size(), 1U) << "the parent's link is as it was";
}

struct Model {
  char* address;
  size_t pages;
  char content;
};

// Every process allocates and frees at random in a thread of its own, beside groups that form.
TEST(PoolLinks, HoldUnderRandomUse) {
  constexpr int kProcesses = 4;
  const auto devices = std::make_shared<FakeChunkDevices>(100 * kPage);
  std::vector<std::unique_ptr<Process>> processes;
  for (int index = 0; index < kProcesses; ++index) {
    processes.push_back(std::make_unique<Process>(devices, std::chrono::milliseconds(2000)));
  }
  std::vector<PoolLinks::Joined> pair = join({{processes[0].get()}, {processes[1].get()}});
  std::vector<PoolLinks::Joined> all;
  std::vector<std::vector<Model>> models(kProcesses);
  run_threads(kProcesses + 1, [&](int index) {
    if (index == kProcesses) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      std::vector<Place> places;
      for (const auto& process : processes) places.push_back({process.get()});
      all = join(places);
      return;
    }
    Process& process = *processes[index];
    std::mt19937 random(index);
    std::vector<Model>& chunks = models[index];
    for (int step = 0; step < 300; ++step) {
      if (chunks.empty() || random() % 2 == 0) {
        const size_t pages = 1 + random() % 5;
        const char content = static_cast<char>(random());
        char* const made = process.allocate(pages, content);
        if (made == nullptr) continue;
        for (const Model& other : chunks) {
          ASSERT_TRUE(made + pages * kPage <= other.address ||
                      other.address + other.pages * kPage <= made);
        }
        chunks.push_back({made, pages, content});
      } else {
        std::swap(chunks[random() % chunks.size()], chunks.back());
        const Model chunk = chunks.back();
        chunks.pop_back();
        ASSERT_EQ(chunk.address[chunk.pages * kPage - 1], chunk.content);
        process.pool().free(chunk.address);
        ASSERT_FALSE(process.pool().is_shared(chunk.address, 1));
      }
    }
  });
  size_t used = 0;
  for (int owner = 0; owner < kProcesses; ++owner) {
    for (const Model& chunk : models[owner]) {
      ASSERT_TRUE(gets_shared(*processes[owner], chunk.address, chunk.pages));
      used += chunk.pages * kPage;
      for (int peer = 0; peer < kProcesses; ++peer) {
        const char* const there = seen(all[peer], owner, *processes[owner], chunk.address);
        ASSERT_EQ(there[0], chunk.content) << owner << " seen by " << peer;
        ASSERT_EQ(there[chunk.pages * kPage - 1], chunk.content);
      }
    }
  }
  EXPECT_TRUE(eventually([&] { return devices->used() == used; }));
  for (int owner = 0; owner < kProcesses; ++owner) {
    for (const Model& chunk : models[owner]) processes[owner]->pool().free(chunk.address);
  }
  EXPECT_TRUE(eventually([&] { return devices->used() == 0; }));
  pair.clear();
  all.clear();
}

}  // namespace
}  // namespace dpt::testing
