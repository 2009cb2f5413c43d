#include "comm/messages.hpp"

#include "comm/flight_record.hpp"

namespace dpt {

dpt_outcome Messages::submit(const dpt_request& request,
                             dpt_done done,
                             void* done_context,
                             uint64_t* recorded) {
  state_.check_usable(request);
  *recorded = facts_.record(request);
  std::string why_delegated = facts_.why_never_native(request);
  if (why_delegated.empty() && facts_.size() == 1) why_delegated = "a group of one rank";
  if (why_delegated.empty()) why_delegated = bootstrap_.join_for_messages(request);
  if (!why_delegated.empty()) {
    return delegation_.start(request, {.reason = std::move(why_delegated)}, *recorded);
  }
  FlightRecord::instance().note(*recorded, FlightRecord::kNative);
  return engine().submit(request, *recorded, done, done_context);
}

PointToPoint& Messages::engine() {
  const Transports& transports = state_.transports();
  std::lock_guard lock(mutex_);
  if (!engine_) {
    engine_ = std::make_unique<PointToPoint>(PointToPoint::Host{
        .segment = *transports.segment,
        .group = facts_.name,
        .statistics = facts_.statistics,
        .interrupted = facts_.interrupted,
        .fail = [this](const Error& reason) { state_.fail(reason.status(), reason.what()); },
        .caller_style = transports.wait_style(0, /*in_caller=*/true)});
  }
  return *engine_;
}

}  // namespace dpt
