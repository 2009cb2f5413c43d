// Limits of every blocking wait of the core: a deadline, and the caller's wish to be interrupted.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "base/error.hpp"

namespace dpt {

// Longest time a wait sleeps before it looks at the abort word, the deadline and Ctrl-C again.
constexpr std::chrono::milliseconds kWaitSlice{100};

// No wait is longer. Clocks count nanoseconds in 64 bits, and a limit that overflows them would be
// over at once: a century leaves room for what is added to it.
constexpr std::chrono::milliseconds kLongestWait = std::chrono::hours(24 * 36500);

constexpr std::chrono::milliseconds limited(std::chrono::milliseconds timeout) {
  return std::clamp(timeout, std::chrono::milliseconds(0), kLongestWait);
}

class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout)
      : timeout_(limited(timeout)),
        begin_(std::chrono::steady_clock::now()),
        end_(begin_ + timeout_) {}

  std::chrono::milliseconds timeout() const { return timeout_; }
  // The same, ending by `grace` later.
  Deadline later(std::chrono::milliseconds grace) const {
    Deadline other = *this;
    other.end_ += grace;
    return other;
  }
  std::chrono::steady_clock::duration elapsed() const {
    return std::chrono::steady_clock::now() - begin_;
  }
  bool expired() const { return std::chrono::steady_clock::now() >= end_; }
  // Time left, at most one slice, never negative.
  std::chrono::milliseconds next_slice() const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end_ - std::chrono::steady_clock::now());
    return std::clamp(left, std::chrono::milliseconds(0), kWaitSlice);
  }

 private:
  std::chrono::milliseconds timeout_;
  std::chrono::steady_clock::time_point begin_;
  std::chrono::steady_clock::time_point end_;
};

struct WaitContext {
  Deadline deadline;
  // Says in messages who waits for what: "all_reduce #3 of group g (...) on rank 0".
  std::function<std::string()> describe;
  // True when the caller should give up (Ctrl-C); may be empty.
  std::function<bool()> interrupted;
  // Throws when a rank that is waited for can't come any more; may be empty.
  std::function<void()> check_peers = {};

  // Every wait without shared memory calls this after each slice.
  void check() const {
    if (interrupted && interrupted()) {
      throw Error(DPT_ERR_INTERRUPTED, describe() + " was interrupted");
    }
    if (check_peers) check_peers();
  }
};

}  // namespace dpt
