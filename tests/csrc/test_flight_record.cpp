// The flight record: order, states, what is dropped, and what an operation costs.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
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
    return *reinterpret_cast<const FlightRecord::Entry*>(
        memory_ + entries_at() + (number - 1) % header().entries * header().entry_bytes);
  }
  // The place that an entry names; `index` counts from 1.
  const FlightRecord::Place& place(uint16_t index) const {
    return *reinterpret_cast<const FlightRecord::Place*>(
        memory_ + entries_at() - (header().places + 1U - index) * header().place_bytes);
  }

 private:
  // Tables fill whole pages.
  size_t entries_at() const { return bytes_ - header().entries * header().entry_bytes; }

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
  EXPECT_EQ(sizeof(FlightRecord::Header), 248U);
  EXPECT_EQ(sizeof(FlightRecord::Group), 720U);
  EXPECT_EQ(sizeof(FlightRecord::Peer), 16U);
  EXPECT_EQ(sizeof(FlightRecord::Place), 256U);
  EXPECT_EQ(sizeof(FlightRecord::Entry), 128U);
  EXPECT_EQ(offsetof(FlightRecord::Header, started_realtime_ns), 80U);
  EXPECT_EQ(offsetof(FlightRecord::Header, next), 240U);
  EXPECT_EQ(offsetof(FlightRecord::Group, name), 32U);
  EXPECT_EQ(offsetof(FlightRecord::Group, collectives), 224U);
  EXPECT_EQ(offsetof(FlightRecord::Entry, root), 48U);
  EXPECT_EQ(offsetof(FlightRecord::Entry, collective), 60U);
  EXPECT_EQ(offsetof(FlightRecord::Entry, state), 64U);
  EXPECT_EQ(offsetof(FlightRecord::Entry, place), 66U);
  EXPECT_EQ(offsetof(FlightRecord::Entry, timeout_ms), 72U);
  EXPECT_EQ(offsetof(FlightRecord::Place, function), 8U);
  EXPECT_EQ(offsetof(FlightRecord::Place, file), 64U);
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

// An operation counts as waited in by `how` it is carried out and whether somebody waits for it.
TEST(FlightRecord, KnowsForHowLongItHasWaited) {
  FlightRecord& record = FlightRecord::instance();
  const int group = record.open_group("waiting", {0, 1});
  const auto waits = [&](dpt_request request, FlightRecord::How how, bool waited_for) {
    request.asynchronous = 1;
    const uint64_t number = record.begin(group, request, how);
    if (waited_for) record.note_wait(number);
    const bool found = record.longest_wait_ns() > 0;
    record.end(number, FlightRecord::kEnded);
    EXPECT_EQ(record.longest_wait_ns(), 0);
    return found;
  };
  EXPECT_EQ(record.longest_wait_ns(), 0);
  EXPECT_TRUE(waits(request_of(DPT_ALL_REDUCE), FlightRecord::kUndecided, false));
  EXPECT_TRUE(waits(request_of(DPT_ALL_REDUCE), FlightRecord::kNative, false));
  EXPECT_FALSE(waits(request_of(DPT_ALL_REDUCE), FlightRecord::kDelegated, false));
  EXPECT_TRUE(waits(request_of(DPT_ALL_REDUCE), FlightRecord::kDelegated, true));
  EXPECT_FALSE(waits(request_of(DPT_RECV), FlightRecord::kNative, false));
  EXPECT_TRUE(waits(request_of(DPT_RECV), FlightRecord::kNative, true));

  // The oldest counts, and of a group that is gone none.
  const uint64_t first = record.begin(group, request_of(DPT_BARRIER));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const uint64_t second = record.begin(group, request_of(DPT_BARRIER));
  EXPECT_GE(record.longest_wait_ns(), 20'000'000);
  record.end(first, FlightRecord::kEnded);
  EXPECT_GT(record.longest_wait_ns(), 0);
  record.close_group(group);
  EXPECT_EQ(record.longest_wait_ns(), 0);
  record.end(second, FlightRecord::kFailed);
}

TEST(FlightRecord, OnADeviceTheLastOperationCounts) {
  FlightRecord& record = FlightRecord::instance();
  const int group = record.open_group("device", {0, 1});
  dpt_request request = request_of(DPT_ALL_REDUCE);
  request.on_device = 1;
  const uint64_t number = record.begin(group, request);
  record.end(number, FlightRecord::kIssued);
  EXPECT_GT(record.longest_wait_ns(), 0);
  record.end(record.begin(group, request_of(DPT_BARRIER)), FlightRecord::kEnded);
  EXPECT_EQ(record.longest_wait_ns(), 0);
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

std::string line_of(const FlightRecord::Place& place) {
  return std::string(place.file) + ":" + std::to_string(place.line) + " " + place.function;
}

TEST(FlightRecord, KnowsWhoCalled) {
  FlightRecord& record = FlightRecord::instance();
  const int group = record.open_group("called", {0, 1});
  const dpt_place step{"/home/me/train.py", "step", 57};
  const dpt_place evaluate{"/home/me/train.py", "evaluate", 57};
  dpt_request request = request_of(DPT_ALL_REDUCE);
  const uint64_t silent = record.begin(group, request);
  request.place = &step;
  const uint64_t told = record.begin(group, request);
  const uint64_t again = record.begin(group, request);
  request.place = nullptr;
  const uint64_t later = record.begin(group, request);
  record.note_place(later, evaluate);
  record.note_place(0, evaluate);  // of an operation that was not recorded
  const Mapped seen;
  EXPECT_EQ(seen.entry(silent).place, 0U);
  EXPECT_EQ(seen.entry(told).place, seen.entry(again).place);
  EXPECT_EQ(line_of(seen.place(seen.entry(told).place)), "/home/me/train.py:57 step");
  EXPECT_EQ(line_of(seen.place(seen.entry(later).place)), "/home/me/train.py:57 evaluate");
  EXPECT_EQ(seen.place(seen.entry(told).place).state, FlightRecord::Place::kWritten);
  record.close_group(group);
}

TEST(FlightRecord, APlaceToldTooLateHitsNobodyElse) {
  FlightRecord& record = FlightRecord::instance();
  const int group = record.open_group("told late", {0, 1});
  const uint64_t old = record.begin(group, request_of(DPT_ALL_REDUCE));
  uint64_t there = old;
  while (there < old + FlightRecord::kEntries) there = record.begin(group, request_of(DPT_REDUCE));
  record.note_place(old, {"late.py", "late", 1});
  const Mapped seen;
  EXPECT_EQ(seen.entry(there).place, 0U);
  record.close_group(group);
}

TEST(FlightRecord, LongNamesKeepWhatTellsThemApart) {
  FlightRecord& record = FlightRecord::instance();
  const int group = record.open_group("long names", {0});
  const std::string folders(1000, 'd');
  const std::string file = folders + "/experiments/train.py";
  const std::string function(500, 'f');
  const uint64_t number = record.begin(group, request_of(DPT_BARRIER));
  record.note_place(number, {file.c_str(), function.c_str(), 3});
  const Mapped seen;
  const FlightRecord::Place& place = seen.place(seen.entry(number).place);
  const std::string kept(place.file);
  EXPECT_EQ(kept.size(), sizeof place.file - 1);
  EXPECT_EQ(kept.substr(0, 4), "...d");
  EXPECT_EQ(kept.substr(kept.size() - 21), "/experiments/train.py");
  EXPECT_EQ(std::string(place.function), function.substr(0, sizeof place.function - 1));
  record.close_group(group);
}

TEST(FlightRecord, ThreadsThatBringPlacesAtOnceGetTheirOwn) {
  constexpr int kThreads = 4;
  constexpr int kLines = 20;
  FlightRecord& record = FlightRecord::instance();
  const int group = record.open_group("places", {0});
  const Mapped seen;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int n = 0; n < 5 * kLines; ++n) {
        const int line = 1000 + (n * 7 + i) % kLines;
        const std::string function = "line" + std::to_string(line);
        dpt_request request = request_of(DPT_BARRIER);
        const dpt_place place{"threads.py", function.c_str(), line};
        request.place = &place;
        const uint64_t number = record.begin(group, request);
        const uint16_t index = seen.entry(number).place;
        const std::string expected = "threads.py:" + std::to_string(line) + " " + function;
        if (index == 0 || line_of(seen.place(index)) != expected) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  record.close_group(group);
}

// Last of those with places: from here on all are taken.
TEST(FlightRecord, PlacesBeyondTheTableAreNotSampled) {
  FlightRecord& record = FlightRecord::instance();
  const int group = record.open_group("many places", {0});
  const Mapped seen;
  uint64_t first = 0;
  uint64_t number = 0;
  for (int line = 1; line <= static_cast<int>(FlightRecord::kPlaces) + 1; ++line) {
    number = record.begin(group, request_of(DPT_BARRIER));
    record.note_place(number, {"many.py", "many", line});
    if (first == 0) first = number;
  }
  EXPECT_EQ(seen.entry(number).place, 0U);
  EXPECT_EQ(line_of(seen.place(seen.entry(first).place)), "many.py:1 many");
  // Those that are there still are found.
  record.note_place(number, {"many.py", "many", 1});
  EXPECT_EQ(seen.entry(number).place, seen.entry(first).place);
  record.close_group(group);
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
    const FlightRecord::Group& group = seen.group(seen.entry(number).group);
    if (group.id != seen.entry(number).group) continue;  // of one that had its place before
    if (std::string(group.name) != "followed") continue;
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
