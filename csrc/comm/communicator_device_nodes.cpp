// The communicator's part on GPUs of a group that spans nodes: what the ranks agree on when they
// meet there, and what they measure then.
#include <algorithm>

#include "comm/communicator.hpp"
#include "comm/device_bench.hpp"
#include "comm/device_class.hpp"
#include "comm/measure.hpp"
#include "comm/race.hpp"
#include "tuner/choose_device.hpp"

namespace dpt {

bool Communicator::are_alike(const WaitContext& wait, bool mine) const {
  const NodeLayout& layout = transports_.nodes->layout;
  for (const auto& ranks : layout.ranks) {
    if (ranks.size() != layout.ranks[0].size()) return false;
  }
  Operation none{};
  none.collective = DPT_BARRIER;
  const Plan plan;
  const RunContext context{
      *transports_.segment, none, plan, wait, WaitStyle::kBackground, transports_.nodes.get()};
  const std::vector<char> all = exchange(context, static_cast<char>(mine));
  return std::all_of(all.begin(), all.end(), [](char each) { return each != 0; });
}

bool Communicator::can_go_by_nodes(const WaitContext& wait) const {
  return transports_.nodes->layout.ranks[0].size() > 1 &&
         are_alike(wait, facts_.delegate.start_by_nodes != nullptr);
}

bool Communicator::wants_staging_by_nodes(const WaitContext& wait) const {
  // As long as nobody has timed it on GPUs it is for who asks.
  const bool asked = facts_.delegate.execute == nullptr || facts_.forces_tuning;
  return transports_.nodes->layout.size() <= kMostMeasuringRanks && are_alike(wait, asked);
}

void Communicator::agree_on_stages(const WaitContext& wait) {
  if (!can_go_by_nodes(wait)) return;
  if (are_alike(wait, facts_.delegate.execute == nullptr)) {
    device_->by_nodes = true;  // by the rule: nothing competes with it
    return;
  }
  // CPU-Reduce competes with the delegate as it is.
  if (device_->group || transports_.nodes->layout.size() > kMostMeasuringRanks) return;
  Operation none{};
  none.collective = DPT_BARRIER;
  const Plan plan;
  const RunContext here{*transports_.segment, none, plan, wait, WaitStyle::kBackground};
  const DeviceClass devices = describe_devices(here, device_->device, ranks_here(), true);
  const RunContext context{
      *transports_.segment, none, plan, wait, WaitStyle::kBackground, transports_.nodes.get()};
  // NCCL refuses ranks that share a GPU.
  device_tuning_.agree_on_device(context, text_in_stages(devices), !devices.shared);
  device_->by_nodes = device_tuning_.delegate_competes();
}

// All sizes at once, while the ranks are here anyway: later they may come at different times, which
// nothing but an operation's timeout would tell the other nodes.
void Communicator::settle_between_nodes(const dpt_request& request, const WaitContext& wait) {
  DeviceGroup* const group = device_->group.get();
  if (group == nullptr && !device_->by_nodes) return;
  DeviceBench bench(group, request, device_tuning_.rival(), {});
  const Plan plan;
  const void* no_input = nullptr;  // the trials have their own
  void* no_output = nullptr;
  const auto settle = [&](Collective collective, int bucket) {
    const size_t bytes = range_of(bucket).nominal;
    const bool serves = group != nullptr
                            ? collective != DPT_ALL_TO_ALL
                            : goes_by_nodes(collective, bytes, transports_.nodes->layout.size());
    if (!serves || !device_tuning_.is_open(collective, bytes)) return;
    const Operation operation{.collective = collective,
                              .dtype = DPT_BFLOAT16,
                              .reduce_op = trial_reduce_op(collective),
                              .premul_factor = 1,
                              .root = 0,
                              .count = bytes / size_of(DPT_BFLOAT16),
                              .inputs = &no_input,
                              .outputs = &no_output,
                              .sequence = order_.next_sequence++};
    WaitContext own_time = wait;
    own_time.deadline = Deadline(wait.deadline.timeout());
    device_tuning_.settle({*transports_.segment,
                           operation,
                           plan,
                           own_time,
                           WaitStyle::kBackground,
                           transports_.nodes.get()},
                          bytes,
                          bench);
  };
  for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
    for (const Collective collective : {DPT_ALL_REDUCE, DPT_ALL_GATHER, DPT_REDUCE_SCATTER}) {
      settle(collective, bucket);
    }
  }
  // Operations that fewer programs call get what is left of the time.
  for (int bucket = 0; bucket < kNumBuckets; ++bucket) settle(DPT_ALL_TO_ALL, bucket);
}

}  // namespace dpt
