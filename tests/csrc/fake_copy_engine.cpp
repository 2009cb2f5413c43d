#include "fake_copy_engine.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>

#include "base/error.hpp"
#include "host/reduce.hpp"
#include "staged/board.hpp"
#include "staged/sanitizer.hpp"

namespace dpt::testing {
namespace {

using staged::Rows;

// Lanes that wait leave the cores to those that copy.
constexpr std::chrono::microseconds kPoll{5};
constexpr std::chrono::microseconds kSlowestPoll{320};

void copy_rows(char* to, size_t to_pitch, const char* from, size_t from_pitch, const Rows& rows) {
  for (size_t row = 0; row < rows.count; ++row) {
    std::memcpy(to + row * to_pitch, from + row * from_pitch, rows.bytes);
  }
}

// Makes commands that come on `behind` wait for those on `before`.
void order(FakeLane& before, FakeLane& behind) {
  auto event = std::make_shared<std::atomic<bool>>(false);
  before.push([event] {
    event->store(true, std::memory_order_release);
    return true;
  });
  behind.push([event] { return event->load(std::memory_order_acquire); });
}

}  // namespace

FakeLane::FakeLane(unsigned seed, int most_delay_us)
    : random_(seed), most_delay_us_(most_delay_us), thread_([this] { run(); }) {}

FakeLane::~FakeLane() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void FakeLane::push(std::function<bool()> command) {
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
  }
  changed_.notify_all();
}

bool FakeLane::is_idle() {
  const std::lock_guard lock(mutex_);
  return commands_.empty();
}

void FakeLane::synchronize() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return commands_.empty(); });
}

void FakeLane::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !commands_.empty(); });
    if (commands_.empty()) return;
    std::function<bool()>& command = commands_.front();  // stays where it is while others come
    lock.unlock();
    if (most_delay_us_ > 0) {
      const auto delay = std::uniform_int_distribution<int>(0, most_delay_us_)(random_);
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    for (auto nap = kPoll; !command(); nap = std::min(nap * 2, kSlowestPoll)) {
      std::this_thread::sleep_for(nap);
    }
    lock.lock();
    commands_.pop_front();
    if (commands_.empty()) changed_.notify_all();
  }
}

FakeCopyEngine::FakeCopyEngine(unsigned seed, Options options) : options_(std::move(options)) {
  for (Lane& each : lanes_) {
    if (options_.queues != nullptr) {
      each.queue = options_.queues->next();
      continue;
    }
    if (queues_.empty() || !options_.one_queue) {
      queues_.emplace_back(seed + static_cast<unsigned>(queues_.size()), options_.most_delay_us);
    }
    each.queue = &queues_.back();
  }
}

bool FakeCopyEngine::is_idle() {
  return std::all_of(queues_.begin(), queues_.end(), [](FakeLane& each) { return each.is_idle(); });
}

FakeLane& FakeCopyEngine::flushed(Lane& lane) {
  for (Command& word : lane.words) lane.queue->push(std::move(word));
  lane.words.clear();
  return *lane.queue;
}

void FakeCopyEngine::submit(staged::Lane which) { flushed(lane(which)); }

void FakeCopyEngine::map(char* memory, size_t bytes, size_t buffer_bytes) {
  if (!options_.can_map) throw Error(DPT_ERR_SYSTEM, "this fake driver maps nothing");
  mapped_ = memory;
  mapped_bytes_ = bytes;
  broken_ = &staged::Board(memory, {}).broken();
  for (std::vector<char>& each : buffers_) each.resize(buffer_bytes);
}

void FakeCopyEngine::check_mapped(const char* host, const Rows& rows) const {
  const char* const end = host + (rows.count - 1) * rows.host_pitch + rows.bytes;
  const bool is_mapped = mapped_ <= host && end <= mapped_ + mapped_bytes_;
  DPT_CHECK(is_mapped != options_.on_devices);
  if (options_.before_copy) options_.before_copy();
}

void FakeCopyEngine::fork(staged::Stream stream) {
  if (options_.on_fork) options_.on_fork();
  if (stream == nullptr) return;
  for (Lane& each : lanes_) order(*static_cast<FakeLane*>(stream), flushed(each));
}

void FakeCopyEngine::meet() {
  Lane& last = lane({staged::Lane::kDown, 0});
  for (Lane& each : lanes_) {
    if (&each != &last) order(flushed(each), flushed(last));
  }
}

void FakeCopyEngine::join(staged::Stream stream) {
  FakeLane& last = flushed(lane({staged::Lane::kDown, 0}));
  if (stream != nullptr) order(last, *static_cast<FakeLane*>(stream));
}

bool FakeCopyEngine::is_one(const char* memory, size_t bytes) {
  const auto holds = [&](std::span<const char> each) {
    return memory >= each.data() && memory + bytes <= each.data() + each.size();
  };
  const auto& all = options_.allocations;
  return all.empty() || std::any_of(all.begin(), all.end(), holds);
}

void FakeCopyEngine::copy_up(int index, char* host, const char* device, const Rows& rows) {
  DPT_CHECK(rows.count == 1 || is_one(device, (rows.count - 1) * rows.device_pitch + rows.bytes));
  check_mapped(host, rows);
  flushed(lane({staged::Lane::kUp, index})).push([=, this] {
    if (!is_broken()) copy_rows(host, rows.host_pitch, device, rows.device_pitch, rows);
    return true;
  });
}

void FakeCopyEngine::copy_down(int index, char* device, const char* host, const Rows& rows) {
  check_mapped(host, rows);
  flushed(lane({staged::Lane::kDown, index})).push([=, this] {
    if (!is_broken()) copy_rows(device, rows.device_pitch, host, rows.host_pitch, rows);
    return true;
  });
}

void FakeCopyEngine::reduce(int index, const staged::Pieces& pieces) {
  const std::vector<char>& buffer = buffers_[index];
  DPT_CHECK(pieces.others == buffer.data());
  DPT_CHECK(static_cast<size_t>(pieces.ranks - 1) * pieces.pitch <= buffer.size());
  flushed(lane({staged::Lane::kDown, index})).push([=, this] {
    if (is_broken()) return true;
    std::vector<const void*> sources;
    const char* other = pieces.others;
    for (int rank = 0; rank < pieces.ranks; ++rank) {
      sources.push_back(rank == pieces.rank ? pieces.own : other);
      if (rank != pieces.rank) other += pieces.pitch;
    }
    dpt::reduce({.dtype = pieces.dtype,
                 .op = pieces.op,
                 .sources = sources.data(),
                 .num_sources = pieces.ranks,
                 .count = pieces.bytes / size_of(pieces.dtype),
                 .destination = pieces.to});
    return true;
  });
}

void FakeCopyEngine::copy_local(char* to, const char* from, size_t bytes) {
  flushed(lane({staged::Lane::kDown, 0})).push([=] {
    std::memcpy(to, from, bytes);
    return true;
  });
}

void FakeCopyEngine::wait(staged::Lane which, const staged::Word& word, uint32_t value) {
  lane(which).words.push_back([&word, value, aliased = options_.aliased] {
    if (!staged::has_come_to(word.load(std::memory_order_acquire), value)) return false;
    if (aliased) staged::tell_sanitizer_of_wait();
    return true;
  });
}

void FakeCopyEngine::wait_for_bits(staged::Lane which, const staged::Word& word, uint32_t bits) {
  lane(which).words.push_back(
      [&word, bits] { return (word.load(std::memory_order_acquire) & bits) != 0; });
}

void FakeCopyEngine::write(staged::Lane which, staged::Word& word, uint32_t value) {
  lane(which).words.push_back([&word, value, aliased = options_.aliased] {
    if (aliased) staged::tell_sanitizer_of_write();
    word.store(value, std::memory_order_release);
    return true;
  });
}

}  // namespace dpt::testing
