#include "comm/device_collectives.hpp"

#include <algorithm>
#include <mutex>

#include "comm/fabric.hpp"
#include "comm/flight_record.hpp"
#include "comm/hybrid.hpp"
#include "comm/lost_rank.hpp"

namespace dpt {
namespace {

constexpr const char* kInOne = "of a list, which is one kernel of the stock backend";

}  // namespace

DeviceCollectives::DeviceCollectives(const dpt_comm_options& options, const GroupParts& parts)
    : facts_(parts.facts),
      state_(parts.state),
      transports_(parts.state.transports()),
      order_(parts.order),
      delegation_(parts.delegation),
      membership_(options, parts),
      planner_(parts.facts, parts.state.transports(), membership_) {}

dpt_outcome DeviceCollectives::submit(const dpt_request& request, uint64_t* recorded) {
  std::unique_lock order(order_.mutex);
  state_.check_usable(request);
  membership_.check(request);
  *recorded = facts_.record(request);
  bool lasts = false;
  DevicePlan plan = planner_.plan(request, &lasts);
  const bool by_nodes = plan.algorithm == AlgorithmName::kInStages;
  if (by_nodes || plan.algorithm == AlgorithmName::kDelegate) {
    StatisticsRow* const row =
        facts_.statistics->row_of(request.collective, plan.algorithm, plan.reason.c_str());
    if (lasts) known_.add(request, by_nodes, row);
    order.unlock();
    return delegation_.start(request, row, by_nodes, *recorded);
  }
  FlightRecord::instance().note(*recorded, FlightRecord::kNative);
  launch(request, plan);
  facts_.statistics->add(request.collective,
                         plan.algorithm,
                         plan.reason.c_str(),
                         request.count * size_of(request.dtype),
                         0);
  return DPT_COMPLETED;
}

void DeviceCollectives::launch(const dpt_request& request, const DevicePlan& plan) {
  const cuda::Stream stream = request.stream(request.call);
  // Copies may be on their way in part, and the other ranks wait for the rest.
  bool ended_here = false;
  const auto failed = [&](const Error& error) {
    ended_here = !transports_.segment->aborted() && state_.fail(error.status(), error.what());
  };
  try {
    launch_divided(*membership_.joined()->group,
                   {&facts_.delegate, transports_.segment.get()},
                   {request, plan, stream, failed});
  } catch (const Error&) {
    if (ended_here) throw;
    // If a rank is lost, that says more than what came of it.
    state_.check_usable(request);
    membership_.check_staged(request);
    throw;
  }
}

[[gnu::hot]] bool DeviceCollectives::begin_known(const dpt_request& request, dpt_known* begun) {
  // Anything that is to be said, or waited for, first takes the long way.
  if (state_.has_failed() || Fabric::forked()) return false;
  if (delegation_.is_ahead()) return false;
  const std::lock_guard order(order_.mutex);
  const KnownDelegated::Known* const known = known_.find(request);
  if (known == nullptr || membership_.is_broken()) return false;
  begun->recorded =
      FlightRecord::instance().begin(facts_.record_group, request, FlightRecord::kDelegated);
  begun->node_of = known->by_nodes ? transports_.nodes->layout.node_of.data() : nullptr;
  facts_.statistics->add(known->row, request.count * size_of(request.dtype), 0);
  before_delegate(state_.watched_segment());
  return true;
}

dpt_status DeviceCollectives::fail_known(const dpt_request& request,
                                         uint64_t recorded,
                                         dpt_status status,
                                         const dpt_error& error) {
  FlightRecord::instance().end(recorded, FlightRecord::kFailed);
  status = after_delegate(state_.watched_segment(), status, error);
  state_.check_usable(request);  // why it was abandoned meanwhile
  return status;
}

StatisticsRow* DeviceCollectives::row_of_delegated(const dpt_request& request) {
  const KnownDelegated::Known* const known = known_.find(request);
  if (known != nullptr) return known->by_nodes ? nullptr : known->row;
  const std::optional<DevicePlan> plan = planner_.settled_plan(request);
  if (!plan || plan->algorithm != AlgorithmName::kDelegate) return nullptr;
  StatisticsRow* const row =
      facts_.statistics->row_of(request.collective, AlgorithmName::kDelegate, plan->reason.c_str());
  known_.add(request, false, row);
  return row;
}

// Not by what this rank happens to know: the ranks start together what they agree on.
//
// The stock backend makes one kernel of a list, and ours run one after another. On two H200 joined
// by NVLink four all_reduces of 16 KiB to 1 MiB took 1.1 to 1.2 times as long as NCCL's list. 24 of
// up to 4 MiB took 1.3 to 2.5 times as long, though each alone took 0.75 to 0.9 of NCCL's time.
// Through the host's memory the bytes take long, so a measured time holds for each of a list.
void DeviceCollectives::begin_coalesced(const dpt_request* requests,
                                        size_t count,
                                        uint64_t* recorded,
                                        int* begun) {
  std::fill_n(begun, count, 0);
  if (state_.has_failed() || Fabric::forked()) return;
  delegation_.wait_for_host_operations(requests[0]);
  const std::lock_guard order(order_.mutex);
  if (membership_.is_broken()) return;
  const JoinedDevice* const joined = membership_.joined();
  const bool in_one = joined != nullptr && joined->group && !joined->staged && !transports_.nodes &&
                      count > 1 && membership_.tuning().delegate_competes();
  StatisticsRow* row = nullptr;
  if (in_one) {
    row = facts_.statistics->row_of(requests[0].collective, AlgorithmName::kDelegate, kInOne);
  }
  bool any = false;
  for (size_t i = 0; i < count; ++i) {
    const dpt_request& request = requests[i];
    if (!in_one) row = row_of_delegated(request);
    if (row == nullptr) continue;
    recorded[i] =
        FlightRecord::instance().begin(facts_.record_group, request, FlightRecord::kDelegated);
    facts_.statistics->add(row, request.count * size_of(request.dtype), 0);
    begun[i] = any = true;
  }
  if (any) before_delegate(state_.watched_segment());
}

}  // namespace dpt
