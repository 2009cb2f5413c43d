// A rank of a group that died or left, as the watchdog's thread sees it. Nothing on a device tells
// that to what waits for it there.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <string>

namespace dpt {

class Segment;

class LostRank {
 public:
  using Time = std::chrono::steady_clock::time_point;

  struct Patience {
    std::chrono::milliseconds arrival{1000};  // of what a rank has sent before
    std::chrono::milliseconds with_dead{10'000};
    std::chrono::milliseconds with_left{20'000};  // the others may have much to compute
  };
  // Tests, before anything watches, have less.
  static Patience& patience();

  void look(const Segment& segment, Time now);
  // "rank 1 (pid 4711) died" or the like; empty: all ranks were there at the last look. From any
  // thread.
  std::string who() const;
  // Whether all that it sent has arrived.
  bool is_long_gone(Time now) const;
  // Whether `waits` was true at every question for so long that it is this rank that is waited for.
  bool keeps_waiting(bool waits, Time now);

  void note(const std::string& who, bool died, Time now);

 private:
  mutable std::mutex mutex_;  // guards who_, which is written once
  std::string who_;
  bool died_ = false;
  std::optional<Time> since_;
  std::optional<Time> waits_since_;
};

}  // namespace dpt
