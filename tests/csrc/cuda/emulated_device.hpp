// csrc/cuda's kernels on host threads: every thread of every channel is a std::thread, every rank's
// block lies in host memory. Slow, but all of a kernel's logic runs, also under ThreadSanitizer.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/arguments.hpp"

#define DPT_DEVICE inline
#define DPT_DEVICE_CALL inline
#define DPT_SHARED(type, name) type& name = *emulated_thread.channel->shared<type>()

namespace dpt::cuda {

// Sleeps until `word` is no more `value`, or for `most`.
inline void sleep_on(const void* word, uint32_t value, const timespec* most) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, most, nullptr, 0);
}
inline void wake_all_on(const void* word) {
  constexpr int kAll = std::numeric_limits<int>::max();
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, kAll, nullptr, nullptr, 0);
}

// Threads that meet, and vote. They sleep at once, where std::barrier takes time from those that
// are to come.
struct EmulatedBarrier {
  explicit EmulatedBarrier(int threads) : threads(threads) {}
  void sync() { sync_and(true); }
  bool sync_and(bool ok) {
    const uint32_t meeting = meetings.load(std::memory_order_acquire);
    if (!ok) refused.store(true, std::memory_order_relaxed);
    if (come.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      all_ok[meeting % 2] = !refused.exchange(false, std::memory_order_relaxed);
      come.store(0, std::memory_order_relaxed);
      meetings.store(meeting + 1, std::memory_order_release);
      wake_all_on(&meetings);
    }
    while (meetings.load(std::memory_order_acquire) == meeting) {
      sleep_on(&meetings, meeting, nullptr);
    }
    return all_ok[meeting % 2];  // until all have come to the meeting after the next
  }
  const int threads;
  std::atomic<uint32_t> meetings{0};
  std::atomic<int> come{0};
  std::atomic<bool> refused{false};
  bool all_ok[2] = {};
};

// One crew of a packet's, and at least as many threads as a group has ranks.
constexpr int kWarp = kLanes;

struct EmulatedChannel {
  explicit EmulatedChannel(int threads) : all(threads), warps(split(threads, kWarp)) {}
  template <typename T>
  T* shared() {
    static_assert(sizeof(T) <= sizeof memory);
    return reinterpret_cast<T*>(memory);
  }
  using Barriers = std::vector<std::unique_ptr<EmulatedBarrier>>;
  static Barriers split(int threads, int by) {
    Barriers barriers;
    for (int first = 0; first < threads; first += by) {
      barriers.push_back(std::make_unique<EmulatedBarrier>(std::min(by, threads - first)));
    }
    return barriers;
  }
  EmulatedBarrier all;
  Barriers warps;
  alignas(16) char memory[2048] = {};
};

struct EmulatedThread {
  int channel_index;
  int num_channels;
  int thread_index;
  int num_threads;
  EmulatedChannel* channel;
};
inline thread_local EmulatedThread emulated_thread;

inline int channel_index() { return emulated_thread.channel_index; }
inline int num_channels() { return emulated_thread.num_channels; }
inline int thread_index() { return emulated_thread.thread_index; }
inline int num_threads() { return emulated_thread.num_threads; }

inline void sync_channel() { emulated_thread.channel->all.sync(); }
inline bool sync_channel_and(bool ok) { return emulated_thread.channel->all.sync_and(ok); }
inline EmulatedBarrier& emulated_warp() {
  return *emulated_thread.channel->warps[emulated_thread.thread_index / kWarp];
}
inline void sync_warp() { emulated_warp().sync(); }
inline bool warp_and(bool ok) { return emulated_warp().sync_and(ok); }

inline uint64_t clock_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

template <typename T>
std::atomic_ref<T> atomic(const T* at) {
  return std::atomic_ref<T>(*const_cast<T*>(at));
}
// There are many more threads than cores. Who polls lets others run, and who does so in vain sleeps
// a while, or until the word changes: else those that wait would take the time of those that work.
// They sleep longer where they poll nothing but one word.
constexpr uint32_t kPollsPerCheck = 16;
struct Polling {
  const void* word = nullptr;
  int polls = 0;  // since the thread last stored something
  int same = 0;   // of them, the last ones of one word
};
inline thread_local Polling polling;

inline void before_poll(const void* word, uint32_t value) {
  constexpr int kYields = 4;
  constexpr long kNapNs = 100'000;
  polling.same = word == polling.word ? polling.same + 1 : 0;
  polling.word = word;
  if (++polling.polls <= kYields) return std::this_thread::yield();
  const timespec nap{0, kNapNs << std::min(polling.same, 6)};
  sleep_on(word, value, &nap);
}

template <typename T>
T load_acquire(const T* from) {
  before_poll(from, static_cast<uint32_t>(atomic(from).load(std::memory_order_relaxed)));
  return atomic(from).load(std::memory_order_acquire);
}
template <typename T>
void store_release(T* to, std::type_identity_t<T> value) {
  atomic(to).store(value, std::memory_order_release);
  polling = {};
  wake_all_on(to);
}
template <typename T>
T load_relaxed(const T* from) {
  return atomic(from).load(std::memory_order_relaxed);
}
// A device issues in order: what was read before is in registers by then. A host needs to be told.
inline void store_relaxed(uint32_t* to, uint32_t value) {
  atomic(to).store(value, std::memory_order_release);
}
inline void clear_relaxed(uint64_t* at, uint64_t old) {
  atomic(at).compare_exchange_strong(old, 0, std::memory_order_relaxed);
}

inline uint32_t load_shared(const uint32_t* from) { return load_acquire(from); }
inline void store_shared(uint32_t* to, uint32_t value) { store_release(to, value); }

inline uint4 load_staged(const uint4* from) { return *from; }
inline void store_line(uint4* to, uint4 value) {
  uint64_t halves[2];
  std::memcpy(halves, &value, sizeof value);
  auto* target = reinterpret_cast<uint64_t*>(to);
  for (int i = 0; i < 2; ++i) atomic(target + i).store(halves[i], std::memory_order_relaxed);
}
inline uint4 load_line(const uint4* from) {
  std::this_thread::yield();
  const auto* source = reinterpret_cast<const uint64_t*>(from);
  uint64_t halves[2];
  for (int i = 0; i < 2; ++i) halves[i] = atomic(source + i).load(std::memory_order_relaxed);
  uint4 value;
  std::memcpy(&value, halves, sizeof value);
  return value;
}

// A line of a packet is whole where its last part, which has the number, is.
inline void store_lane(uint4* to, uint4 value) {
  const bool last = emulated_thread.thread_index % kLanes == kLanes - 1;
  if (!last) store_line(to, value);
  sync_warp();
  if (last) store_line(to, value);
}
inline uint4 load_lane(const uint4* from) {
  const bool last = emulated_thread.thread_index % kLanes == kLanes - 1;
  uint4 value{};
  if (last) value = load_line(from);
  sync_warp();
  return last ? value : load_line(from);
}

// Runs the kernel to its end.
template <typename... Parameters, typename... Arguments>
void start(void (*kernel)(Parameters...), const Launch& launch, const Arguments&... arguments) {
  const auto [channels, threads] = launch.grid;
  std::vector<std::unique_ptr<EmulatedChannel>> states;
  std::vector<std::thread> running;
  for (int channel = 0; channel < channels; ++channel) {
    states.push_back(std::make_unique<EmulatedChannel>(threads));
    for (int thread = 0; thread < threads; ++thread) {
      running.emplace_back([&,
                            state = states.back().get(),
                            channel,
                            thread,
                            channels = channels,
                            threads = threads] {
        emulated_thread = {channel, channels, thread, threads, state};
        kernel(arguments...);
      });
    }
  }
  for (std::thread& each : running) each.join();
}

template <typename... Parameters>
void load(void (*)(Parameters...)) {}

}  // namespace dpt::cuda
