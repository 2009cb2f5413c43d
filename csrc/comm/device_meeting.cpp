#include "comm/device_meeting.hpp"

#include <algorithm>
#include <cstring>

#include "base/env.hpp"
#include "comm/device_bench.hpp"
#include "comm/device_class.hpp"
#include "comm/fabric.hpp"
#include "comm/measure.hpp"
#include "comm/race.hpp"
#include "cuda/trees/device_links.hpp"
#include "tuner/choose_device.hpp"
#include "tuner/choose_staged.hpp"

namespace dpt {
namespace {

constexpr size_t kDefaultStagingBytes = size_t{256} << 20;
// One group gets at most this part of what is left: there is always some for the next.
constexpr size_t kShareOfStaging = 3;

struct Text {
  char text[DeviceGroup::kMostWords + 16];
};

}  // namespace

DeviceMeeting::DeviceMeeting(const GroupFacts& facts,
                             const Transports& transports,
                             GroupTuning& tuning,
                             const WaitContext& wait)
    : facts_(facts), transports_(transports), tuning_(tuning), wait_(wait) {
  none_.collective = DPT_BARRIER;
}

RunContext DeviceMeeting::context_here() const {
  return {*transports_.segment, none_, plan_, wait_, WaitStyle::kBackground};
}

RunContext DeviceMeeting::context() const {
  return {
      *transports_.segment, none_, plan_, wait_, WaitStyle::kBackground, transports_.nodes.get()};
}

void DeviceMeeting::connect(GroupBootstrap& bootstrap, JoinedDevice* joined) {
  const auto refuse = [&] { joined->why_not = "ranks on several nodes have no GPU kernels"; };
  if (transports_.nodes && !wants_staging_by_nodes()) return refuse();
  const DeviceClass devices =
      describe_devices(context_here(), joined->device, ranks_here(), transports_.nodes != nullptr);
  const int num_ranks_here = transports_.segment->size();
  const bool is_apart = !devices.peer_access || num_ranks_here == 1;
  if (transports_.nodes && !are_alike(is_apart)) return refuse();
  const auto all_gather = [&](const std::string& mine) {
    Text text{};
    std::strncpy(text.text, mine.c_str(), sizeof text.text - 1);
    std::vector<std::string> all;
    for (const Text& each : exchange(context(), text)) all.emplace_back(each.text);
    return all;
  };
  Fabric& fabric = Fabric::instance();
  const size_t most = facts_.staging_bytes != 0 ? facts_.staging_bytes : kDefaultStagingBytes;
  const size_t used = fabric.device_staging_used();
  const size_t left = most - std::min(most, used);
  // If ranks share a GPU, the kernels of all of them may have to find room there.
  const int num_sms = devices.shared ? devices.num_sms / num_ranks_here : devices.num_sms;
  const int channels = offer_channels(num_sms, fabric.device_channels_used(), env().gpu_channels);
  const std::shared_ptr<staged::Between> between =
      transports_.nodes ? bootstrap.connect_between(wait_) : nullptr;
  const auto connect = [&](bool peer_access) {
    DeviceGroup::Setup setup{facts_.rank,
                             facts_.global_ranks,
                             joined->device,
                             left / kShareOfStaging,
                             channels,
                             devices.nvlink,
                             all_gather,
                             wait_,
                             peer_access,
                             workers_near(devices.cpus),
                             transports_.nodes ? transports_.nodes->layout : NodeLayout{},
                             between,
                             !facts_.raise_errors};
    const auto trees = pack_trees(devices.links);
    if (peer_access && trees) {
      setup.wiring = wiring_of(devices.links);
      setup.nvlink = devices.nvlink && setup.wiring != cuda::Wiring::kPartial;
      setup.trees = *trees;
      setup.neighbours = neighbours_of(devices.links, facts_.rank);
    }
    joined->group = DeviceGroup::connect(setup);
    joined->staged = joined->group->staging().slot_bytes != 0;
  };
  if (transports_.nodes || (!devices.peer_access && devices.links.size == 0)) {
    connect(false);
  } else {
    try {
      connect(true);
    } catch (const Error& error) {
      // The same on all ranks. Where a process sees its own GPU only, this is how it is found out.
      if (error.status() != DPT_ERR_SYSTEM || devices.peer_access_is_known) throw;
      connect(false);
    }
  }
  // NCCL refuses ranks that share a GPU.
  tuning_.agree_on_device(context(), devices.text, !devices.shared);
  joined->staging_bytes = joined->group->memory_bytes();
  fabric.add_device_use(static_cast<int64_t>(joined->staging_bytes),
                        joined->group->layout().channels);
}

DeviceGroup::Workers DeviceMeeting::workers_near(const std::vector<int>& cpus) const {
  const int asked = env().reduce_threads;
  const int threads =
      asked != 0 ? asked : usual_workers(transports_.cores_here / transports_.segment->size());
  int all = 0;
  for (const int each : exchange(context_here(), threads)) all += each;
  return {threads, cpus, transports_.oversubscribed || all > transports_.cores_here};
}

// As the job numbers them.
std::vector<int64_t> DeviceMeeting::ranks_here() const {
  if (!transports_.nodes) return facts_.global_ranks;
  std::vector<int64_t> here;
  for (const int rank : transports_.nodes->layout.ranks[transports_.nodes->node()])
    here.push_back(facts_.global_ranks[rank]);
  return here;
}

bool DeviceMeeting::are_alike(bool mine) const {
  const NodeLayout& layout = transports_.nodes->layout;
  for (const auto& ranks : layout.ranks) {
    if (ranks.size() != layout.ranks[0].size()) return false;
  }
  const std::vector<char> all = exchange(context(), static_cast<char>(mine));
  return std::all_of(all.begin(), all.end(), [](char each) { return each != 0; });
}

bool DeviceMeeting::wants_staging_by_nodes() const {
  // As long as nobody has timed it on GPUs it is for who asks.
  const bool asked = facts_.delegate.execute == nullptr || facts_.forces_tuning;
  return transports_.nodes->layout.size() <= kMostMeasuringRanks && are_alike(asked);
}

bool DeviceMeeting::can_go_by_nodes() const {
  return transports_.nodes->layout.ranks[0].size() > 1 &&
         are_alike(facts_.delegate.start_by_nodes != nullptr);
}

void DeviceMeeting::agree_on_stages(JoinedDevice* joined) {
  if (!can_go_by_nodes()) return;
  if (are_alike(facts_.delegate.execute == nullptr)) {
    joined->by_nodes = true;  // by the rule: nothing competes with it
    return;
  }
  // CPU-Reduce competes with the delegate as it is.
  if (joined->group || transports_.nodes->layout.size() > kMostMeasuringRanks) return;
  const DeviceClass devices = describe_devices(context_here(), joined->device, ranks_here(), true);
  // NCCL refuses ranks that share a GPU.
  tuning_.agree_on_device(context(), text_in_stages(devices), !devices.shared);
  joined->by_nodes = tuning_.delegate_competes();
}

// Settles all sizes at once, while the ranks are here anyway. Later they may come at different
// times, and nothing but an operation's timeout would tell the other nodes.
void DeviceMeeting::settle_between_nodes(const dpt_request& request,
                                         const JoinedDevice& joined,
                                         uint64_t* next_sequence) {
  DeviceGroup* const group = joined.group.get();
  if (group == nullptr && !joined.by_nodes) return;
  DeviceBench bench(group, request, tuning_.rival(), {});
  const void* no_input = nullptr;  // the trials have their own
  void* no_output = nullptr;
  const auto settle = [&](Collective collective, int bucket) {
    const size_t bytes = range_of(bucket).nominal;
    const bool serves = group != nullptr
                            ? collective != DPT_ALL_TO_ALL
                            : goes_by_nodes(collective, bytes, transports_.nodes->layout.size());
    if (!serves || !tuning_.is_open(collective, bytes)) return;
    const Operation operation{.collective = collective,
                              .dtype = DPT_BFLOAT16,
                              .reduce_op = trial_reduce_op(collective),
                              .premul_factor = 1,
                              .root = 0,
                              .count = bytes / size_of(DPT_BFLOAT16),
                              .inputs = &no_input,
                              .outputs = &no_output,
                              .sequence = (*next_sequence)++};
    WaitContext own_time = wait_;
    own_time.deadline = Deadline(wait_.deadline.timeout());
    tuning_.settle({*transports_.segment,
                    operation,
                    plan_,
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
