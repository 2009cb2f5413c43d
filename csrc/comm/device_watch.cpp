#include "comm/device_watch.hpp"

#include "comm/end_process.hpp"
#include "comm/fabric.hpp"

namespace dpt {

void DeviceWatch::start(const JoinedDevice& joined) {
  joined_ = &joined;
  Fabric::instance().on_tick(state_.transports().segment.get(),
                             [this, judged = false]() mutable { judged = judged || watch(); });
}

void DeviceWatch::stop() {
  Segment* const segment = state_.transports().segment.get();
  if (segment != nullptr) Fabric::instance().on_tick(segment, nullptr);
}

bool DeviceWatch::watch() {
  const auto now = std::chrono::steady_clock::now();
  Segment& segment = *state_.transports().segment;
  lost_.look(segment, now);
  DeviceGroup* const group = joined_->group.get();
  if (group == nullptr) return watch_delegate();
  if (segment.aborted()) {
    group->abort();
  } else if (lost_.is_long_gone(now)) {
    group->stop_waiting();
  }
  const auto failure = group->failure();
  if (!failure) return watch_delegate();
  // A kernel gave up. It holds its stream until here it is decided whether the program may go on
  // with what is unfinished. A program that ended the group itself knows that it is.
  const bool wanted = state_.was_aborted();
  const Error error = error_of(*failure);
  state_.fail(error.status(), error.what());
  if (!facts_.raise_errors && !wanted) end_process(begun_with(facts_.explain, error.what()));
  group->release();
  if (!wanted) abandon_delegate();
  return true;
}

// Not where NCCL may yet come to its end. A divided operation has a part with NCCL, which waits for
// the same rank as ours; and behind that the program's thread may be held up by a full queue.
void DeviceWatch::abandon_delegate() const {
  if (!facts_.raise_errors || facts_.delegate.abandon == nullptr) return;
  const bool is_staged = joined_ != nullptr && joined_->staged;
  if (is_staged || !lost_.who().empty()) facts_.delegate.abandon(facts_.delegate.context);
}

// The delegate's kernels wait for a lost rank without end, and NCCL itself looks after minutes.
bool DeviceWatch::watch_delegate() {
  const std::string who = lost_.who();
  if (who.empty() || facts_.delegate.is_waiting == nullptr) return false;
  if (state_.was_aborted()) return true;  // who ended it himself knows
  dpt_waits waits = DPT_WAITS_NOT;
  DeviceGroup::outside_capture(
      joined_->device, [&] { waits = facts_.delegate.is_waiting(facts_.delegate.context); });
  const auto now = std::chrono::steady_clock::now();
  if (!lost_.keeps_waiting(waits != DPT_WAITS_NOT, now)) return false;
  const std::string reason = "an operation of group " + facts_.name +
                             " that NCCL carries out on rank " +
                             std::to_string(facts_.global_rank()) + " waits in vain: " + who;
  state_.fail(DPT_ERR_PEER_LOST, reason);
  // An operation that is being started never comes back, so there is no next call that could raise.
  if (waits == DPT_WAITS_IN_START) {
    end_process(reason, Instead::kNothing);
  } else if (!facts_.raise_errors) {
    end_process(reason);
  } else {
    abandon_delegate();
  }
  return true;
}

Error DeviceWatch::error_of(const DeviceGroup::Failure& failure) const {
  const Transports& transports = state_.transports();
  const std::string peer = "rank " + std::to_string(facts_.global_ranks[failure.peer]);
  const std::string where = "native operation #" + std::to_string(failure.sequence) +
                            " on GPUs of " + facts_.place() + ": ";
  if (failure.kind == DeviceGroup::Failure::kMismatch) {
    return {DPT_ERR_MISMATCH,
            where + peer + " is in another operation, or one of another size or type"};
  }
  // The late rank of another node is known there; here perhaps only whose part is missing.
  const bool is_elsewhere = transports.nodes && transports.nodes->layout.node_of[failure.peer] !=
                                                    transports.nodes->node();
  if (failure.kind == DeviceGroup::Failure::kAborted || is_elsewhere) {
    try {
      transports.segment->throw_if_aborted();
    } catch (const Error& error) {
      return {error.status(), where + error.what()};
    }
    if (const std::string who = lost_.who(); !who.empty()) {
      return {DPT_ERR_PEER_LOST, where + who};
    }
  }
  // Along trees that one may be waiting as well, for a rank that it alone reaches.
  const bool may_wait = joined_->group->wiring() != cuda::Wiring::kAlike;
  return {
      DPT_ERR_TIMEOUT,
      where + peer + (may_wait ? ", or a rank that it waits for," : "") + " did not come in time"};
}

}  // namespace dpt
