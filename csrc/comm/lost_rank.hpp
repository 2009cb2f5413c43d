// A rank of a group that died, left, or whose stock backend failed, as the watchdog's thread sees
// it. Nothing on a device tells that to what waits for it there.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <string>

#include "deepytorch.h"

namespace dpt {

class Segment;

class LostRank {
 public:
  using Time = std::chrono::steady_clock::time_point;

  struct Patience {
    std::chrono::milliseconds arrival{1000};  // of what a rank has sent before
    std::chrono::milliseconds with_dead{10'000};
    std::chrono::milliseconds with_left{20'000};    // the others may have much to compute
    std::chrono::milliseconds with_failed{10'000};  // that may try again
  };
  // Tests, before anything watches, have less.
  static Patience& patience();

  enum class How { kDied, kLeft, kStockFailed };

  void look(const Segment& segment, Time now);
  // "rank 1 (pid 4711) died" or the like; empty: all ranks were there at the last look. From any
  // thread.
  std::string who() const;
  // Whether all that it sent has arrived.
  bool is_long_gone(Time now) const;
  // Whether `waits` was true at every question for so long that it is this rank that is waited for.
  bool keeps_waiting(bool waits, Time now);

  void note(const std::string& who, How how, Time now);

 private:
  bool look_for_gone(const Segment& segment, Time now);
  void look_for_failed(const Segment& segment, Time now);
  void note_failed(const Segment& segment, int rank, const std::string& why, Time now);

  mutable std::mutex mutex_;  // guards who_
  std::string who_;
  How how_ = How::kStockFailed;
  std::optional<Time> since_;
  bool failed_ = false;  // its stock backend had, whatever else happened since
  std::optional<Time> waits_since_;
};

// Before an operation of the delegate's on a device is started, and after: the other ranks'
// watchdogs (`segment`; nullptr: nobody's) hear of it if that broke the delegate, until this rank
// tries again. Returns `status`, but DPT_ERR_DELEGATE for that.
void before_delegate(Segment* segment);
dpt_status after_delegate(Segment* segment, dpt_status status, const dpt_error& error);

}  // namespace dpt
