// A device whose lanes are threads: they carry out commands in order, each after a random delay.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "staged/copy_engine.hpp"

namespace dpt::testing {

// Commands in order. Each is tried until it returns true.
class FakeLane {
 public:
  // `most_delay_us`: of a command.
  FakeLane(unsigned seed, int most_delay_us);
  ~FakeLane();  // after what was enqueued

  void push(std::function<bool()> command);
  bool is_idle();
  void synchronize();

 private:
  void run();

  std::mt19937 random_;
  const int most_delay_us_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<bool()>> commands_;  // the one under way first
  bool stop_ = false;
  std::thread thread_;
};

// A device's queues, dealt out in turn to the lanes of all groups of a process.
class FakeQueues {
 public:
  FakeQueues(int count, unsigned seed) {
    for (int i = 0; i < count; ++i) queues_.emplace_back(seed + static_cast<unsigned>(i), 0);
  }
  FakeLane* next() { return &queues_[dealt_++ % queues_.size()]; }

 private:
  std::deque<FakeLane> queues_;
  size_t dealt_ = 0;
};

class FakeCopyEngine final : public staged::CopyEngine {
 public:
  // As a device does whose driver has no such functions.
  struct Options {
    int most_delay_us = 0;
    bool can_map = true;
    bool one_queue = false;        // for all lanes
    FakeQueues* queues = nullptr;  // instead of the lanes' own
    bool on_devices = false;       // slots are: nothing but words is mapped
    // Ranks see the memory at an address each: segment.cpp, NOTE [Thread sanitizer].
    bool aliased = false;
    // A command copies several rows of one of these at most; none: of any memory.
    std::vector<std::span<const char>> allocations = {};
    // Called at the begin of each operation.
    std::function<void()> on_fork = {};
    // Called before each copy; what it throws `enqueue` throws.
    std::function<void()> before_copy = {};
  };
  FakeCopyEngine(unsigned seed, Options options);

  // Streams are FakeLane*; nullptr: one on which nothing is under way.
  void map(char* memory, size_t bytes, size_t buffer_bytes) override;
  std::shared_ptr<void> enter() override { return nullptr; }
  void fork(staged::Stream stream) override;
  void meet() override;
  void join(staged::Stream stream) override;
  bool is_one(const char* memory, size_t bytes) override;
  void copy_up(int index, char* host, const char* device, const staged::Rows& rows) override;
  void copy_down(int index, char* device, const char* host, const staged::Rows& rows) override;
  char* buffer(int index) override { return buffers_[index].data(); }
  void reduce(int index, const staged::Pieces& pieces) override;
  void copy_local(char* to, const char* from, size_t bytes) override;
  void wait(staged::Lane lane, const staged::Word& word, uint32_t value) override;
  void wait_for_bits(staged::Lane lane, const staged::Word& word, uint32_t bits) override;
  void write(staged::Lane lane, staged::Word& word, uint32_t value) override;
  void submit(staged::Lane lane) override;
  bool is_idle() override;

 private:
  using Command = std::function<bool()>;
  // Words are kept back as long as they may be.
  struct Lane {
    std::vector<Command> words;
    FakeLane* queue;
  };

  Lane& lane(staged::Lane which) {
    return lanes_[which.direction * staged::Lane::kCount + which.index];
  }
  FakeLane& flushed(Lane& lane);
  // Then nothing is copied any more: a device would copy what others write, unseen by anybody but
  // the thread sanitizer.
  bool is_broken() const { return broken_->load(std::memory_order_acquire) != 0; }
  void check_mapped(const char* host, const staged::Rows& rows) const;

  const Options options_;
  char* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  const staged::Word* broken_ = nullptr;
  std::vector<char> buffers_[staged::Lane::kCount];
  std::deque<FakeLane> queues_;
  Lane lanes_[2 * staged::Lane::kCount];
};

}  // namespace dpt::testing
