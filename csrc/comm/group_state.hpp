// The state of a group: whether its ranks have met, over what, and whether it has failed.
//
// A failure that leaves the ranks out of step (a dead rank, a timeout, Ctrl-C) ends the group for
// good: every later call says so and why.
//
// Locks: `mutex_` guards the failure, and the replacement of the transports' segment and nodes,
// which `fail` aborts under it. No other lock of the communicator is taken inside. One thread
// connects the group: it alone writes the rest of the transports, before `set_connected`. The
// others read them once they have seen `is_connected`, or in the group's turn (comm/progress.hpp).
// Thread safety: all functions from any thread, but `leave` by the last one.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/error.hpp"
#include "base/wait.hpp"
#include "comm/group_facts.hpp"
#include "comm/transports.hpp"

namespace dpt {

class GroupState {
 public:
  explicit GroupState(const GroupFacts& facts) : facts_(facts) {}

  bool is_connected() const { return connected_.load(std::memory_order_acquire); }
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  // Neither has happened.
  bool may_yet_connect() const;
  const Transports& transports() const { return transports_; }
  // From this the other ranks' watchdogs hear what becomes of an operation on a device.
  Segment* watched_segment() const { return is_connected() ? transports_.segment.get() : nullptr; }

  std::optional<Error> failure() const;
  // The program, or the group's end, has aborted it, and so knows what is unfinished.
  bool was_aborted() const;
  // Throws Error if the group has failed, or this is a forked child.
  void check_usable(const dpt_request& request) const;
  // Waits until the ranks have met, the group has failed or a slice has passed; returns failure().
  std::optional<Error> wait_until_connected();

  // True: this is what ended the group.
  bool fail(dpt_status status, const std::string& reason);
  // Says who failed; fails the group unless the ranks are still in step.
  [[noreturn]] void fail_operation(const Error& error, const WaitContext& wait);

  // By the thread that connects the group.
  Transports& connecting() { return transports_; }
  void set_segment(std::unique_ptr<Segment> segment);
  void set_nodes(std::unique_ptr<Nodes> nodes);
  void set_connected();
  // Ends the transports, and tells the peers that this rank has left.
  void leave();

 private:
  const GroupFacts& facts_;
  // The short way looks at these, and at the segment.
  std::atomic<bool> has_failed_{false};  // failure_ is set
  std::atomic<bool> connected_{false};
  Transports transports_;

  mutable std::mutex mutex_;
  std::optional<Error> failure_;
  std::condition_variable changed_;  // connected_ or failure_ was set
};

}  // namespace dpt
