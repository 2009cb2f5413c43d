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

  void look(const Segment& segment, Time now);
  // "rank 1 (pid 4711) died" or the like; empty: all ranks were there at the last look. From any
  // thread.
  std::string who() const;
  // Whether all that it sent has arrived.
  bool is_long_gone(Time now) const;
  // Whether `waits` was true at every question for so long that it is this rank that is waited for.
  // One that left in peace gets more time: the others may have much to compute.
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
