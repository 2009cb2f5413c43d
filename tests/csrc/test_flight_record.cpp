// The flight record: order, states, what is dropped, and what an operation costs.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "comm/flight_record.hpp"
#include "rank_threads.hpp"

namespace dpt::testing {
namespace {

// The record, as whoever opens its descriptor sees it.
class Mapped {
 public:
  Mapped() {
    struct stat info{};
    fstat(FlightRecord::instance().fd(), &info);
    bytes_ = static_cast<size_t>(info.st_size);
    memory_ = static_cast<const char*>(
        mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, FlightRecord::instance().fd(), 0));
  }
  ~Mapped() { munmap(const_cast<char*>(memory_), bytes_); }
  const FlightRecord::Header& header() const {
    return *reinterpret_cast<const FlightRecord::Header*>(memory_);
  }
  const FlightRecord::Group& group(int id) const {
    return *reinterpret_cast<const FlightRecord::Group*>(
        memory_ + header().header_bytes + id % header().groups * header().group_bytes);
  }
  const FlightRecord::Entry& entry(uint64_t number) const {
    const size_t end = bytes_ - header().entries * header().entry_bytes;
    return *reinterpret_cast<const FlightRecord::Entry*>(
        memory_ + end + (number - 1) % header().entries * header().entry_bytes);
  }

 private:
  size_t bytes_;
  const char* memory_;
};

dpt_request request_of(dpt_collective collective, size_t count = 10) {
  dpt_request request{};
  request.collective = collective;
  request.dtype = DPT_FLOAT32;
  request.reduce_op = DPT_SUM;
  request.count = count;
  return request;
}

TEST(FlightRecord, LayoutIsWhatReadersExpect) {
  EXPECT_EQ(sizeof(FlightRecord::Header), 240U);
  EXPECT_EQ(sizeof(FlightRecord::Group), 720U);
  EXPECT_EQ(sizeof(FlightRecord::Peer), 16U);
  EXPECT_EQ(sizeof(FlightRecord::Entry), 128U);
  EXPECT_EQ(offsetof(FlightRecord::Header, started_realtime_ns), 72U);
  EXPECT_EQ(offsetof(FlightRecord::Header, next), 232U);
  EXPECT_EQ(offsetof(FlightRecord::Group, name), 32U);
  EXPECT_EQ(offsetof(FlightRecord::Group, collectives), 224U);
  EXPECT_EQ(offsetof(FlightRecord::Entry, root), 48U);
  EXPECT_EQ(offsetof(FlightRecord::Entry, collective), 60U);
  EXPECT_EQ(offsetof(FlightRecord::Entry, state), 64U);
  const Mapped record;
  EXPECT_EQ(std::memcmp(record.header().magic, "dptfly01", 8), 0);
}

TEST(FlightRecord, SizeIsSealed) { EXPECT_NE(ftruncate(FlightRecord::instance().fd(), 0), 0); }

TEST(FlightRecord, CountsCollectivesAndMessagesApart) {
  FlightRecord& record = FlightRecord::instance();
  const int group = record.open_group("counting", {3, 5, 7});
  const uint64_t first = record.begin(group, request_of(DPT_ALL_REDUCE));
  const uint64_t second = record.begin(group, request_of(DPT_SEND));
  const uint64_t third = record.begin(group, request_of(DPT_BARRIER));
  const Mapped seen;
  EXPECT_EQ(seen.entry(first).sequence, 1U);
  EXPECT_EQ(seen.entry(second).sequence, 1U);
  EXPECT_EQ(seen.entry(third).sequence, 2U);
  EXPECT_EQ(seen.group(group).collectives, 2U);
  EXPECT_EQ(seen.group(group).messages, 1U);
  EXPECT_EQ(seen.group(group).first_rank, 3);
  EXPECT_EQ(seen.group(group).stride, 2);
  record.close_group(group);
}

TEST(FlightRecord, OnlyTheFirstEndCounts) {
  FlightRecord& record = FlightRecord::instance();
  const int group = record.open_group("ending", {0, 1});
  const uint64_t number = record.begin(group, request_of(DPT_ALL_REDUCE));
  const Mapped seen;
  EXPECT_EQ(seen.entry(number).state, FlightRecord::kEntered);
  record.note(number, FlightRecord::kDelegated);
  record.end(number, FlightRecord::kFailed);
  record.end(number, FlightRecord::kEnded);
  EXPECT_EQ(seen.entry(number).state, FlightRecord::kFailed);
  EXPECT_EQ(seen.entry(number).how, FlightRecord::kDelegated);
  record.end(0, FlightRecord::kEnded);  // of an operation that was not recorded
  record.close_group(group);
}

TEST(FlightRecord, AnEndThatComesTooLateHitsNobodyElse) {
  FlightRecord& record = FlightRecord::instance();
  const int group = record.open_group("late", {0, 1});
  const uint64_t old = record.begin(group, request_of(DPT_ALL_REDUCE));
  uint64_t there = old;
  while (there < old + FlightRecord::kEntries) there = record.begin(group, request_of(DPT_REDUCE));
  record.end(old, FlightRecord::kFailed);
  const Mapped seen;
  EXPECT_EQ(seen.entry(there).number, there);
  EXPECT_EQ(seen.entry(there).state, FlightRecord::kEntered);
  record.close_group(group);
}

TEST(FlightRecord, ManyThreadsWriteAtOnce) {
  constexpr int kThreads = 4;
  constexpr uint64_t kEach = 500;  // all together fit into the ring, however long one sleeps
  FlightRecord& record = FlightRecord::instance();
  const int group = record.open_group("threads", {0});
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (uint64_t n = 0; n < kEach; ++n) {
        record.end(record.begin(group, request_of(DPT_BARRIER)), FlightRecord::kEnded);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Mapped seen;
  EXPECT_EQ(seen.group(group).collectives, kThreads * kEach);
  record.close_group(group);
}

TEST(FlightRecord, GroupsBeyondTheTableAreNotRecorded) {
  FlightRecord& record = FlightRecord::instance();
  std::vector<int> open;
  while (open.empty() || open.back() >= 0) {
    open.push_back(record.open_group("table " + std::to_string(open.size()), {0}));
  }
  EXPECT_EQ(record.begin(-1, request_of(DPT_BARRIER)), 0U);
  for (const int group : open) record.close_group(group);
  const int again = record.open_group("table again", {0});
  EXPECT_GE(again, 0);
  record.close_group(again);
}

TEST(FlightRecord, FollowsOperationsToTheirEnd) {
  run_ranks(2,
            [](Rank& rank) {
              std::vector<float> values(100, 1.0F);
              Request sum(DPT_ALL_REDUCE, DPT_FLOAT32, values.size());
              sum.reduce_op(DPT_SUM).input(values.data()).output(values.data());
              rank.run(sum);
              rank.start(Request(DPT_BARRIER, DPT_UINT8, 0)).get();
              Request message(rank.rank() == 0 ? DPT_SEND : DPT_RECV, DPT_FLOAT32, 100);
              message.root(1 - rank.rank()).timeout_ms(20000);
              rank.rank() == 0 ? message.input(values.data()) : message.output(values.data());
              rank.run(message);
              rank.barrier();
            },
            {.group = "followed"});
  const Mapped seen;
  const uint64_t begun = seen.header().next;
  int ended = 0;
  for (uint64_t number = begun < 8 ? 1 : begun - 7; number <= begun; ++number) {
    if (std::string(seen.group(seen.entry(number).group).name) != "followed") continue;
    EXPECT_EQ(seen.entry(number).state, FlightRecord::kEnded);
    EXPECT_EQ(seen.entry(number).how, FlightRecord::kNative);
    ++ended;
  }
  // Ranks are threads here, and of one process a name belongs to the group that was opened last.
  EXPECT_GE(ended, 4);
}

// Not a test of time: the figure is for who runs this by hand.
TEST(FlightRecord, SaysWhatAnOperationCosts) {
  FlightRecord& record = FlightRecord::instance();
  const int group = record.open_group("cost", {0, 1});
  const dpt_request request = request_of(DPT_ALL_REDUCE);
  constexpr int kRounds = 200000;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kRounds; ++i) {
    const uint64_t number = record.begin(group, request);
    record.note(number, FlightRecord::kNative);
    record.end(number, FlightRecord::kEnded);
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  std::printf("flight record: %.0f ns for each operation\n", took.count() / kRounds);
  RecordProperty("ns_per_operation", static_cast<int>(took.count() / kRounds));
  record.close_group(group);
}

}  // namespace
}  // namespace dpt::testing
