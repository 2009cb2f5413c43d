#include "comm/rendezvous.hpp"

#include <chrono>
#include <thread>

namespace dpt {
namespace {

// A place's word: how often ranks came, and whether one withdrew. After that nobody counts any
// more.
constexpr uint32_t kWithdrawn = 1u << 31;
constexpr std::chrono::microseconds kPoll{20};

bool a_peer_has_left(const Segment& segment) {
  for (int rank = 0; rank < segment.size(); ++rank) {
    if (segment.has_left(rank)) return true;
  }
  return false;
}

}  // namespace

bool rendezvous(const RunContext& context, int place, uint32_t visit, const Deadline& limit) {
  std::atomic<uint32_t>& word = context.segment.rendezvous(place);
  uint32_t seen = word.load(std::memory_order_acquire);
  do {
    if ((seen & kWithdrawn) != 0) return false;
  } while (!word.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel));

  const uint32_t all = visit * static_cast<uint32_t>(context.size());
  auto next_check = std::chrono::steady_clock::now() + kWaitSlice;
  bool lost = false;
  for (;;) {
    seen = word.load(std::memory_order_acquire);
    if ((seen & ~kWithdrawn) >= all) return true;  // a peer may be at its next visit already
    if ((seen & kWithdrawn) != 0) return false;
    if (lost || limit.expired()) {
      if (word.compare_exchange_strong(seen, seen | kWithdrawn, std::memory_order_acq_rel)) {
        return false;
      }
      continue;
    }
    context.segment.throw_if_aborted();
    if (std::chrono::steady_clock::now() >= next_check) {
      context.wait.check();
      lost = a_peer_has_left(context.segment);
      next_check = std::chrono::steady_clock::now() + kWaitSlice;
    }
    std::this_thread::sleep_for(kPoll);
  }
}

void decline(const RunContext& context, int place) {
  context.segment.rendezvous(place).fetch_or(kWithdrawn, std::memory_order_acq_rel);
}

}  // namespace dpt
