#include "comm/group_state.hpp"

#include "comm/fabric.hpp"

namespace dpt {

bool GroupState::may_yet_connect() const {
  std::lock_guard lock(mutex_);
  return !connected_ && !failure_;
}

std::optional<Error> GroupState::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

bool GroupState::was_aborted() const {
  std::lock_guard lock(mutex_);
  return failure_ && failure_->status() == DPT_ERR_ABORTED;
}

void GroupState::check_usable(const dpt_request& request) const {
  const auto what = [&] { return facts_.describe(request.collective); };
  if (Fabric::forked()) {
    throw Error(DPT_ERR_ABORTED,
                what() +
                    ": this process was made by fork() and has no part in its parent's groups. "
                    "Start it with the spawn method and call init_process_group in it");
  }
  std::lock_guard lock(mutex_);
  if (failure_) {
    throw Error(DPT_ERR_ABORTED,
                what() + ": the group failed earlier: " + failure_->what() +
                    ". Call destroy_process_group and initialise again");
  }
}

std::optional<Error> GroupState::wait_until_connected() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kWaitSlice, [this] { return connected_ || failure_; });
  return failure_;
}

bool GroupState::fail(dpt_status status, const std::string& reason) {
  std::lock_guard lock(mutex_);
  bool is_first = !failure_;
  if (is_first) failure_.emplace(status, reason);
  has_failed_.store(true, std::memory_order_release);
  if (transports_.segment) is_first &= transports_.segment->abort(status, reason);
  if (transports_.nodes) transports_.nodes->links.abort(status, reason);
  changed_.notify_all();
  return is_first;
}

void GroupState::fail_operation(const Error& error, const WaitContext& wait) {
  // All ranks see a mismatch at the same point and stay in step; anything else breaks the group.
  if (error.status() == DPT_ERR_MISMATCH) throw error;
  const std::string who = wait.describe();
  const std::string what = error.what();
  const Error named(error.status(), what.starts_with(who) ? what : who + ": " + what);
  fail(named.status(), named.what());
  throw named;
}

void GroupState::set_segment(std::unique_ptr<Segment> segment) {
  std::lock_guard lock(mutex_);
  transports_.segment = std::move(segment);
}

void GroupState::set_nodes(std::unique_ptr<Nodes> nodes) {
  std::lock_guard lock(mutex_);
  transports_.nodes = std::move(nodes);
}

void GroupState::set_connected() {
  {
    std::lock_guard lock(mutex_);
    connected_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void GroupState::leave() {
  transports_.nodes.reset();
  if (!transports_.segment) return;
  transports_.segment->leave();
  Fabric::instance().detach(transports_.segment.get());
}

}  // namespace dpt
