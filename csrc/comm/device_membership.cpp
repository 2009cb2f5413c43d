#include "comm/device_membership.hpp"

#include <cerrno>

#include "base/log.hpp"
#include "comm/device_bench.hpp"
#include "comm/device_meeting.hpp"
#include "comm/fabric.hpp"

namespace dpt {

DeviceMembership::DeviceMembership(const dpt_comm_options& options, const GroupParts& parts)
    : facts_(parts.facts),
      state_(parts.state),
      transports_(parts.state.transports()),
      order_(parts.order),
      bootstrap_(parts.bootstrap),
      progress_(parts.progress),
      watch_(parts.facts, parts.state),
      tuning_(options, parts.facts.delegate) {}

void DeviceMembership::run_in_turn(const dpt_request& request,
                                   const std::function<void(const WaitContext&)>& task) {
  const WaitContext wait{Deadline(std::chrono::milliseconds(request.timeout_ms)),
                         [this, &request] {
                           return std::string(name_of(request.collective)) +
                                  " (on GPUs, the first of its kind) of " + facts_.place();
                         },
                         facts_.interrupted};
  while (!progress_.try_run_inline([&] { task(wait); })) progress_.drain(kWaitSlice);
}

void DeviceMembership::join(const dpt_request& request) {
  if (joined_) return;
  run_in_turn(request, [&](const WaitContext& wait) { meet(request, wait); });
}

void DeviceMembership::meet(const dpt_request& request, const WaitContext& wait) {
  bootstrap_.connect(wait);
  refuse_without_descriptors(wait);
  auto joined = std::make_unique<JoinedDevice>();
  joined->device = request.device;
  joined->why_not = transports_.why_none;
  if (!transports_.segment) {
    joined_ = std::move(joined);
    return;
  }
  DeviceMeeting meeting(facts_, transports_, tuning_, wait);
  try {
    meeting.connect(bootstrap_, joined.get());
  } catch (const Error& error) {
    if (error.status() != DPT_ERR_SYSTEM) state_.fail_operation(error, wait);
    joined->why_not = error.what();
    // Only who asked for native code misses anything.
    log(facts_.delegate.execute == nullptr ? LogLevel::kWarning : LogLevel::kInfo,
        "group " + facts_.name + " uses the stock backend on GPUs: " + joined->why_not);
  }
  joined_ = std::move(joined);
  watch_.start(*joined_);
  if (!transports_.nodes) return;
  try {
    meeting.agree_on_stages(joined_.get());
    meeting.settle_between_nodes(request, *joined_, &order_.next_sequence);
  } catch (const Error& error) {
    state_.fail_operation(error, wait);
  }
}

// NCCL opens many more than shared memory takes. Where it fails on one rank the others wait for
// that rank in its start, and without a segment nothing would tell them.
void DeviceMembership::refuse_without_descriptors(const WaitContext& wait) {
  const std::string mark = "(errno " + std::to_string(EMFILE) + ")";
  if (transports_.segment || transports_.why_none.find(mark) == std::string::npos) return;
  state_.fail_operation(
      Error(DPT_ERR_SYSTEM,
            transports_.why_none + ". NCCL can't start without file descriptors: raise " +
                "`ulimit -n` there"),
      wait);
}

void DeviceMembership::settle(const dpt_request& request, size_t bytes) {
  const Operation operation{.collective = request.collective,
                            .dtype = request.dtype,
                            .reduce_op = request.reduce_op,
                            .premul_factor = request.premul_factor,
                            .root = request.root,
                            .count = request.count,
                            .inputs = nullptr,
                            .outputs = nullptr,
                            .sequence = order_.next_sequence++};
  const Plan plan;
  run_in_turn(request, [&](const WaitContext& wait) {
    // As long as nobody has timed it on GPUs it is for who asks.
    DeviceBench bench(
        joined_->group.get(), request, tuning_.rival(), {.divides = tuning_.is_forced()});
    try {
      tuning_.settle(
          {*transports_.segment, operation, plan, wait, WaitStyle::kBackground}, bytes, bench);
    } catch (const Error& error) {
      state_.fail_operation(error, wait);
    }
  });
}

void DeviceMembership::leave() {
  if (!joined_) return;
  watch_.stop();
  if (state_.failure()) watch_.abandon_delegate();  // the watchdog may not have come to it
  if (!joined_->group) return;
  Fabric::instance().add_device_use(-static_cast<int64_t>(joined_->staging_bytes),
                                    -joined_->group->layout().channels);
  joined_.reset();
}

bool DeviceMembership::is_broken() const {
  if (!joined_ || !joined_->group) return false;
  return (is_staged() && transports_.segment->aborted()) || joined_->group->failure();
}

void DeviceMembership::check(const dpt_request& request) {
  if (!joined_ || !joined_->group) return;
  check_staged(request);
  const auto failure = joined_->group->failure();
  if (!failure) return;
  const Error error = watch_.error_of(*failure);
  state_.fail(error.status(), error.what());
  state_.check_usable(request);
}

void DeviceMembership::check_staged(const dpt_request& request) {
  if (!is_staged() || !transports_.segment->aborted()) return;
  try {
    transports_.segment->throw_if_aborted();
  } catch (const Error& error) {
    state_.fail(error.status(), error.what());
  }
  state_.check_usable(request);
}

}  // namespace dpt
