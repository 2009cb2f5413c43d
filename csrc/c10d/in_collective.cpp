#include "in_collective.hpp"

#include <atomic>
#include <chrono>
#include <mutex>

namespace dpt::c10d_adapter {
namespace {

std::atomic<int64_t> exposed_ns{0};
std::atomic<uint64_t> num_failures{0};
std::atomic<uint64_t> num_given_bytes{0};
thread_local bool is_inside = false;

struct Followed {
  int64_t began_ns = 0;
  int64_t ended_ns = 0;
};
std::mutex followed_mutex;
Followed last_followed;  // guarded by followed_mutex

}  // namespace

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void note_followed(int64_t began_ns) {
  const std::lock_guard lock(followed_mutex);
  if (began_ns > last_followed.began_ns) last_followed = {began_ns, now_ns()};
}

void step_ended() {
  const std::lock_guard lock(followed_mutex);
  exposed_ns.fetch_add(last_followed.ended_ns - last_followed.began_ns, std::memory_order_relaxed);
  last_followed = {};
}

InCollective::InCollective() : began_ns_(is_inside ? -1 : now_ns()) { is_inside = true; }

InCollective::~InCollective() {
  if (began_ns_ < 0) return;
  is_inside = false;
  exposed_ns.fetch_add(now_ns() - began_ns_, std::memory_order_relaxed);
}

double exposed_s() { return static_cast<double>(exposed_ns.load(std::memory_order_relaxed)) / 1e9; }

void note_failure() { num_failures.fetch_add(1, std::memory_order_relaxed); }

uint64_t failures() { return num_failures.load(std::memory_order_relaxed); }

[[gnu::hot]] void note_given(uint64_t bytes) {
  num_given_bytes.fetch_add(bytes, std::memory_order_relaxed);
}

uint64_t given_bytes() { return num_given_bytes.load(std::memory_order_relaxed); }

}  // namespace dpt::c10d_adapter
