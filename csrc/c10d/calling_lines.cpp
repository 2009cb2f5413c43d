#include "calling_lines.hpp"

#include <algorithm>
#include <ctime>

#include "in_collective.hpp"

namespace dpt::c10d_adapter {
namespace {

constexpr int64_t kLeastPauseNs = 100'000'000;
constexpr int64_t kPauseWithoutPythonNs = 1'000'000'000;
// Waiting for the GIL takes a thread no more than half a percent of its time.
constexpr int64_t kPausePerCost = 200;

thread_local int64_t next_sample_ns = 0;

// A few nanoseconds, as exact as the kernel's tick. Of the same origin as now_ns().
int64_t coarse_now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

[[gnu::hot]] bool CallingLines::is_due(const dpt_request& request) {
  std::atomic<uint64_t>& seen = seen_[request.collective];
  const uint64_t bit = uint64_t{1} << (63 - __builtin_clzll(request.count | 1));
  if ((seen.load(std::memory_order_relaxed) & bit) == 0) {
    return (seen.fetch_or(bit, std::memory_order_relaxed) & bit) == 0;
  }
  return coarse_now_ns() >= next_sample_ns;
}

[[gnu::cold, gnu::noinline]] std::optional<CodeLine> CallingLines::find() {
  const int64_t began_ns = now_ns();
  std::optional<CodeLine> found = find_calling_line();
  const int64_t ended_ns = now_ns();
  const int64_t least_ns = found ? kLeastPauseNs : kPauseWithoutPythonNs;
  next_sample_ns = ended_ns + std::max(least_ns, kPausePerCost * (ended_ns - began_ns));
  return found;
}

[[gnu::cold, gnu::noinline]] void CallingLines::record(uint64_t recorded) const {
  if (const std::optional<CodeLine> line = find()) {
    const dpt_place place = place_of(*line);
    api_->record_place(recorded, &place);
  }
}

}  // namespace dpt::c10d_adapter
