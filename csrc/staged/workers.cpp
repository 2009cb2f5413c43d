#include "staged/workers.hpp"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>

#include "base/thread.hpp"

namespace dpt::staged {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kNap{20};
// A wait that has taken so long may well take longer.
constexpr std::chrono::microseconds kLongNap{50};
constexpr std::chrono::milliseconds kLongWait{5};
// Looks between two at the clock.
constexpr int kLooks = 64;
constexpr int kMostLooks = 1 << 20;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void run_near(const std::vector<int>& cpus) {
  cpu_set_t allowed;
  cpu_set_t near;
  CPU_ZERO(&near);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &near);
  }
  if (CPU_COUNT(&near) > 0) sched_setaffinity(0, sizeof near, &near);
}

Workers::Workers(int threads, const std::vector<int>& cpus, std::chrono::microseconds spin)
    : cpus_(cpus), spin_(spin), seen_(threads) {
  for (int worker = 0; worker < threads; ++worker) {
    threads_.push_back(start_thread([this, worker] { run(worker); }));
  }
}

Workers::~Workers() {
  stop_ = true;
  wake();
  for (std::thread& thread : threads_) thread.join();
}

void Workers::add(Pipeline* pipeline) { change(pipeline, nullptr); }

void Workers::remove(Pipeline* pipeline) {
  change(nullptr, pipeline);
  const uint64_t version = version_.load(std::memory_order_acquire);
  for (const Seen& seen : seen_) {
    while (seen.version.load(std::memory_order_acquire) < version) {
      wake();
      std::this_thread::sleep_for(kNap);
    }
  }
}

void Workers::change(Pipeline* added, const Pipeline* removed) {
  {
    const std::lock_guard lock(mutex_);
    std::erase(pipelines_, removed);
    if (added != nullptr) pipelines_.push_back(added);
    version_.fetch_add(1, std::memory_order_acq_rel);
  }
  wake();
}

void Workers::wake() {
  doorbell_.fetch_add(1, std::memory_order_seq_cst);
  doorbell_.notify_all();
}

void Workers::run(int worker) {
  run_near(cpus_);
  prctl(PR_SET_TIMERSLACK, 1000UL);  // in ns: the default makes a nap three times as long
  std::vector<Pipeline*> pipelines;
  uint64_t version = 0;
  int looks = 0;                 // without anything to do
  Clock::time_point idle_since;  // the first of them
  while (!stop_.load(std::memory_order_relaxed)) {
    const uint32_t rings = doorbell_.load(std::memory_order_seq_cst);
    if (version_.load(std::memory_order_acquire) != version) {
      const std::lock_guard lock(mutex_);
      pipelines = pipelines_;
      version = version_.load(std::memory_order_relaxed);
      seen_[worker].version.store(version, std::memory_order_release);
    }
    bool moved = false;
    bool waits = false;
    for (Pipeline* const pipeline : pipelines) {
      const Pipeline::Progress progress = pipeline->advance(worker);
      moved |= progress == Pipeline::Progress::kMoved;
      waits |= progress == Pipeline::Progress::kWaiting;
    }
    if (moved) {
      looks = 0;
      continue;
    }
    if (looks++ == 0) idle_since = Clock::now();
    const bool spins = spin_.count() != 0 && looks < kMostLooks;
    if (spins && (looks % kLooks != 0 || Clock::now() - idle_since < spin_)) {
      relax();
      continue;
    }
    looks = kMostLooks;  // until something moves
    if (waits) {
      std::this_thread::sleep_for(Clock::now() - idle_since < kLongWait ? kNap : kLongNap);
    } else {
      doorbell_.wait(rings, std::memory_order_seq_cst);
      looks = 0;
    }
  }
}

}  // namespace dpt::staged
