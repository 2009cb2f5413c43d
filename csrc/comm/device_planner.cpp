#include "comm/device_planner.hpp"

#include "comm/hybrid.hpp"
#include "comm/known_delegated.hpp"
#include "staged/job.hpp"
#include "tuner/choose_device.hpp"
#include "tuner/choose_staged.hpp"

namespace dpt {
namespace {

bool is_busy(const dpt_request& request) {
  return request.busy != nullptr && request.busy(request.call) != 0;
}

bool is_even(const dpt_request& request) {
  return request.input_counts == nullptr && request.output_counts == nullptr;
}

// There are kernels for it that take any size.
bool is_large(const dpt_request& request) {
  return request.reduce_op == DPT_NO_REDUCE ||
         cuda::has_large_kernels(request.dtype, request.reduce_op);
}

// A graph would replay the same chunks' numbers.
constexpr const char* kBusy =
    "no CPU-Reduce while a graph captures the stream, or among coalesced operations";

bool has_device_kernels(Collective collective) {
  switch (collective) {
    case DPT_ALL_REDUCE:
    case DPT_ALL_GATHER:
    case DPT_REDUCE_SCATTER:
    case DPT_BROADCAST:
    case DPT_GATHER:
    case DPT_SCATTER:
    case DPT_ALL_TO_ALL:
      return true;
    default:
      return false;
  }
}

// This is for GPUs staged through the host's memory; known once they have met.
std::string why_not_staged(const dpt_request& request, const Transports& transports) {
  return staged::Job::why_not({.collective = request.collective,
                               .dtype = request.dtype,
                               .op = request.reduce_op,
                               .even = is_even(request),
                               .nodes = transports.nodes != nullptr});
}

}  // namespace

std::string DevicePlanner::why_not_native(const dpt_request& request) const {
  if (std::string reason = facts_.why_never_native(request); !reason.empty()) return reason;
  if (facts_.size() == 1) return "a group of one rank";
  if (!has_device_kernels(request.collective)) {
    return std::string("no GPU kernel for ") + name_of(request.collective);
  }
  if (request.reduce_op != DPT_NO_REDUCE &&
      !cuda::can_reduce_on_device(request.dtype, request.reduce_op)) {
    return std::string("no GPU kernel for ") + name_of(request.reduce_op) + " of " +
           name_of(request.dtype);
  }
  return membership_.joined() != nullptr ? "" : DeviceGroup::why_absent();  // found out once
}

std::string DevicePlanner::why_not_joined(const dpt_request& request) const {
  const JoinedDevice& joined = *membership_.joined();
  if (!joined.why_not.empty()) return joined.why_not;
  if (joined.device != request.device) {
    return "the group's GPU on this rank is number " + std::to_string(joined.device);
  }
  if (joined.staged) {
    if (std::string reason = why_not_staged(request, transports_); !reason.empty()) return reason;
  }
  return why_not_wired(joined.group->wiring(), request.collective, is_large(request));
}

bool DevicePlanner::is_open(const dpt_request& request) const {
  const size_t bytes = request.count * size_of(request.dtype);
  return is_even(request) && !transports_.nodes &&
         membership_.tuning().is_open(request.collective, bytes);
}

DevicePlan DevicePlanner::plan(const dpt_request& request, bool* lasts) {
  std::string reason = why_not_native(request);
  const bool may_be_native = reason.empty();
  if (may_be_native) {
    membership_.join(request);
    reason = why_not_joined(request);
  }
  const JoinedDevice* const joined = membership_.joined();
  const bool even = is_even(request);
  const size_t bytes = request.count * size_of(request.dtype);
  const bool by_nodes = may_be_native && joined->by_nodes;
  const bool staged = reason.empty() && membership_.is_staged();
  bool asked = false;  // what the stream does is another thing each time
  const auto busy = [&] {
    asked = true;
    return is_busy(request);
  };
  // Between nodes all was settled when the ranks met.
  if (reason.empty() && is_open(request)) {
    if (staged && busy()) {
      reason = kBusy;
    } else {
      membership_.settle(request, bytes);
    }
  }
  const auto choose = [&](std::string why_not) {
    const bool tunes = why_not.empty() && even;
    // Between nodes, without a group of ours, the measured plan is the delegate in stages.
    const bool tunes_stages = by_nodes && !joined->group && even;
    const Decision* const tuned =
        tunes || tunes_stages ? membership_.tuning().find(request.collective, bytes) : nullptr;
    const bool copies =
        tuned != nullptr && tuned->chosen && tuned->chosen->algorithm == AlgorithmName::kCopyEngine;
    return choose_device(
        {.collective = request.collective,
         .bytes = bytes,
         .even = even,
         .large = is_large(request),
         .layout = why_not.empty() ? joined->group->layout() : cuda::Layout{},
         .wiring = why_not.empty() ? joined->group->wiring() : cuda::Wiring::kAlike,
         .not_native = std::move(why_not),
         .ranks = facts_.size(),
         .nodes = by_nodes ? transports_.num_nodes() : 1,
         .delegate = membership_.tuning().delegate_competes(),
         .staging = membership_.is_staged() ? joined->group->staging() : cuda::Staging{},
         .devices_add =
             !transports_.nodes &&
             staged::Job::adds_on_device(request.collective, request.dtype, request.reduce_op),
         .divisible = can_be_divided(request.collective, request.dtype, request.reduce_op),
         .copies = tunes ? joined->group->copies() : cuda::Staging{},
         .replayed = copies && busy(),
         .tuned = tuned});
  };
  const bool is_settled = !reason.empty() || !is_open(request);
  DevicePlan plan = choose(std::move(reason));
  // Asked last: what is the delegate's anyway need not look at the stream.
  if (staged && plan.algorithm == AlgorithmName::kCpuReduce && busy()) return choose(kBusy);
  *lasts = KnownDelegated::is_plain(request) && !asked && is_settled;
  return plan;
}

std::optional<DevicePlan> DevicePlanner::settled_plan(const dpt_request& request) {
  if (why_not_native(request).empty()) {
    if (membership_.joined() == nullptr) return std::nullopt;
    if (why_not_joined(request).empty() && is_open(request)) return std::nullopt;
  }
  bool lasts = false;
  DevicePlan found = plan(request, &lasts);
  return lasts ? std::optional(std::move(found)) : std::nullopt;
}

}  // namespace dpt
