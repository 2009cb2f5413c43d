#include "comm/delegation.hpp"

#include "comm/flight_record.hpp"
#include "comm/lost_rank.hpp"

namespace dpt {

dpt_outcome Delegation::start(const dpt_request& request, const Plan& plan, uint64_t recorded) {
  StatisticsRow* const row =
      facts_.statistics->row_of(request.collective, plan.algorithm, plan.reason.c_str());
  return start(request, row, /*by_nodes=*/false, recorded);
}

void Delegation::wait_for_host_operations(const dpt_request& request) {
  while (is_ahead() && !progress_.drain(kWaitSlice)) {
    if (facts_.interrupted && facts_.interrupted()) {
      throw Error(DPT_ERR_INTERRUPTED,
                  std::string(name_of(request.collective)) + " of group " + facts_.name +
                      " was interrupted before it started");
    }
  }
}

dpt_outcome Delegation::start(const dpt_request& request,
                              StatisticsRow* row,
                              bool by_nodes,
                              uint64_t recorded) {
  FlightRecord::instance().note(recorded, FlightRecord::kDelegated);
  if (!is_message(request.collective)) wait_for_host_operations(request);
  facts_.statistics->add(row, request.count * size_of(request.dtype), 0);
  dpt_error error;  // a kilobyte that is rarely needed
  error.message[0] = '\0';
  Segment* const watched = request.on_device != 0 ? state_.watched_segment() : nullptr;
  before_delegate(watched);
  const dpt_delegate& delegate = facts_.delegate;
  dpt_status status = DPT_OK;
  if (by_nodes) {
    const int* const node_of = state_.transports().nodes->layout.node_of.data();
    status = delegate.start_by_nodes(delegate.context, request.call, node_of, &error);
  } else {
    status = delegate.start(delegate.context, request.call, &error);
  }
  status = after_delegate(watched, status, error);
  if (status != DPT_OK) {
    if (request.on_device != 0) state_.check_usable(request);  // why it was abandoned meanwhile
    throw Error(status, error.message);
  }
  return DPT_DELEGATED;
}

dpt_status Delegation::run(const Operation& operation,
                           const Plan& plan,
                           Call call,
                           dpt_error* error) {
  FlightRecord::instance().note(call.recorded, FlightRecord::kDelegated);
  facts_.statistics->add(
      operation.collective, plan.algorithm, plan.reason.c_str(), operation.bytes(), 0);
  return facts_.delegate.run(facts_.delegate.context, call.call, error);
}

}  // namespace dpt
