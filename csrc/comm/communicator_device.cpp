// The communicator's part on GPUs: joining their memory at the first operation, then one kernel per
// operation on the caller's stream, or copies through the host's memory behind it.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/env.hpp"
#include "base/log.hpp"
#include "comm/communicator.hpp"
#include "comm/device_bench.hpp"
#include "comm/device_class.hpp"
#include "comm/device_links.hpp"
#include "comm/end_process.hpp"
#include "comm/fabric.hpp"
#include "comm/hybrid.hpp"
#include "comm/measure.hpp"
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

constexpr size_t kDefaultStagingBytes = size_t{256} << 20;
// One group gets at most this part of what is left: there is always some for the next.
constexpr size_t kShareOfStaging = 3;

struct Text {
  char text[DeviceGroup::kMostWords + 16];
};

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

}  // namespace

dpt_outcome Communicator::submit_device(const dpt_request& request, uint64_t* recorded) {
  std::unique_lock order(order_.mutex);
  state_.check_usable(request);
  check_device(request);
  *recorded = facts_.record(request);
  bool lasts = false;
  DevicePlan plan = plan_on_device(request, &lasts);
  const bool by_nodes = std::strcmp(plan.algorithm, "hierarchical") == 0;
  if (by_nodes || std::strcmp(plan.algorithm, "delegate") == 0) {
    StatisticsRow* const row =
        facts_.statistics->row_of(request.collective, plan.algorithm, plan.reason.c_str());
    if (lasts) known_delegated_.add(request, by_nodes, row);
    order.unlock();
    return delegation_.start(request, row, by_nodes, *recorded);
  }
  FlightRecord::instance().note(*recorded, FlightRecord::kNative);
  launch_on_device(request, plan);
  facts_.statistics->add(request.collective,
                         plan.algorithm,
                         plan.reason.c_str(),
                         request.count * size_of(request.dtype),
                         0);
  return DPT_COMPLETED;
}

void Communicator::launch_on_device(const dpt_request& request, const DevicePlan& plan) {
  const cuda::Stream stream = request.stream(request.call);
  // Copies may be on their way in part, and the other ranks wait for the rest.
  bool ended_here = false;
  const auto failed = [&](const Error& error) {
    ended_here = !transports_.segment->aborted() && state_.fail(error.status(), error.what());
  };
  try {
    launch_divided(*device_->group,
                   {&facts_.delegate, transports_.segment.get()},
                   {request, plan, stream, failed});
  } catch (const Error&) {
    if (ended_here) throw;
    // If a rank is lost, that says more than what came of it.
    state_.check_usable(request);
    if (is_staged()) check_segment(request);
    throw;
  }
}

bool Communicator::is_staged() const { return device_ && device_->staged; }

// This is for GPUs staged through the host's memory; known once they have met.
std::string Communicator::why_not_staged(const dpt_request& request) const {
  return staged::Job::why_not({.collective = request.collective,
                               .dtype = request.dtype,
                               .op = request.reduce_op,
                               .even = is_even(request),
                               .nodes = transports_.nodes != nullptr});
}

std::string Communicator::why_not_on_device(const dpt_request& request) const {
  if (std::string reason = facts_.why_never_native(request); !reason.empty()) return reason;
  if (facts_.global_ranks.size() == 1) return "a group of one rank";
  if (!has_device_kernels(request.collective)) {
    return std::string("no GPU kernel for ") + name_of(request.collective);
  }
  if (request.reduce_op != DPT_NO_REDUCE &&
      !cuda::can_reduce_on_device(request.dtype, request.reduce_op)) {
    return std::string("no GPU kernel for ") + name_of(request.reduce_op) + " of " +
           name_of(request.dtype);
  }
  return device_ ? "" : DeviceGroup::why_absent();  // found out once
}

// This is for GPUs that have met.
std::string Communicator::why_not_in_group(const dpt_request& request) const {
  if (!device_->why_not.empty()) return device_->why_not;
  if (device_->device != request.device) {
    return "the group's GPU on this rank is number " + std::to_string(device_->device);
  }
  if (is_staged()) {
    if (std::string reason = why_not_staged(request); !reason.empty()) return reason;
  }
  return why_not_wired(device_->group->wiring(), request.collective, is_large(request));
}

// Nobody has measured yet who is faster.
bool Communicator::is_open_on_device(const dpt_request& request) const {
  const size_t bytes = request.count * size_of(request.dtype);
  return is_even(request) && !transports_.nodes &&
         device_tuning_.is_open(request.collective, bytes);
}

DevicePlan Communicator::plan_on_device(const dpt_request& request, bool* lasts) {
  std::string reason = why_not_on_device(request);
  const bool may_be_native = reason.empty();
  if (may_be_native) {
    join_devices(request);
    reason = why_not_in_group(request);
  }
  const bool even = is_even(request);
  const size_t bytes = request.count * size_of(request.dtype);
  const bool by_nodes = may_be_native && device_->by_nodes;
  const bool staged = reason.empty() && is_staged();
  bool asked = false;  // what the stream does is another thing each time
  const auto busy = [&] {
    asked = true;
    return is_busy(request);
  };
  // Between nodes all was settled when the ranks met.
  if (reason.empty() && is_open_on_device(request)) {
    if (staged && busy()) {
      reason = kBusy;
    } else {
      settle_on_device(request, bytes);
    }
  }
  const auto choose = [&](std::string why_not) {
    const bool tunes = why_not.empty() && even;
    // Between nodes, without a group of ours, the measured plan is the delegate in stages.
    const bool tunes_stages = by_nodes && !device_->group && even;
    const Decision* const tuned =
        tunes || tunes_stages ? device_tuning_.find(request.collective, bytes) : nullptr;
    const bool copies = tuned != nullptr && tuned->chosen.algorithm == cuda::kCopyEngine;
    return choose_device(
        {.collective = request.collective,
         .bytes = bytes,
         .even = even,
         .large = is_large(request),
         .layout = why_not.empty() ? device_->group->layout() : cuda::Layout{},
         .wiring = why_not.empty() ? device_->group->wiring() : cuda::Wiring::kAlike,
         .not_native = std::move(why_not),
         .ranks = facts_.size(),
         .nodes = by_nodes ? transports_.num_nodes() : 1,
         .delegate = device_tuning_.delegate_competes(),
         .staging = is_staged() ? device_->group->staging() : cuda::Staging{},
         .devices_add =
             !transports_.nodes &&
             staged::Job::adds_on_device(request.collective, request.dtype, request.reduce_op),
         .divisible = can_be_divided(request.collective, request.dtype, request.reduce_op),
         .copies = tunes ? device_->group->copies() : cuda::Staging{},
         .replayed = copies && busy(),
         .tuned = tuned});
  };
  const bool is_settled = !reason.empty() || !is_open_on_device(request);
  DevicePlan plan = choose(std::move(reason));
  // Asked last: what is the delegate's anyway need not look at the stream.
  if (staged && plan.algorithm == kCpuReduce && busy()) return choose(kBusy);
  *lasts = KnownDelegated::is_plain(request) && !asked && is_settled;
  return plan;
}

// The plan, if there is no need to meet the other ranks for it, or to look at the stream.
std::optional<DevicePlan> Communicator::settled_plan(const dpt_request& request) {
  if (why_not_on_device(request).empty()) {
    if (!device_) return std::nullopt;
    if (why_not_in_group(request).empty() && is_open_on_device(request)) return std::nullopt;
  }
  bool lasts = false;
  DevicePlan plan = plan_on_device(request, &lasts);
  return lasts ? std::optional(std::move(plan)) : std::nullopt;
}

void Communicator::run_in_turn(const dpt_request& request,
                               const std::function<void(const WaitContext&)>& task) {
  const WaitContext wait{Deadline(std::chrono::milliseconds(request.timeout_ms)),
                         [this, &request] {
                           return std::string(name_of(request.collective)) +
                                  " (on GPUs, the first of its kind) of " + facts_.place();
                         },
                         facts_.interrupted};
  while (!progress_.try_run_inline([&] { task(wait); })) progress_.drain(kWaitSlice);
}

void Communicator::settle_on_device(const dpt_request& request, size_t bytes) {
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
    DeviceBench bench(device_->group.get(),
                      request,
                      device_tuning_.rival(),
                      {.divides = device_tuning_.is_forced()});
    try {
      device_tuning_.settle(
          {*transports_.segment, operation, plan, wait, WaitStyle::kBackground}, bytes, bench);
    } catch (const Error& error) {
      state_.fail_operation(error, wait);
    }
  });
}

void Communicator::join_devices(const dpt_request& request) {
  if (device_) return;
  run_in_turn(request, [&](const WaitContext& wait) {
    bootstrap_.connect(wait);
    refuse_without_descriptors(wait);
    auto state = std::make_unique<DeviceState>();
    state->device = request.device;
    state->why_not = transports_.why_none;
    if (transports_.segment) {
      try {
        connect_devices(request.device, wait, state.get());
      } catch (const Error& error) {
        if (error.status() != DPT_ERR_SYSTEM) state_.fail_operation(error, wait);
        state->why_not = error.what();
        // Only who asked for native code misses anything.
        log(facts_.delegate.execute == nullptr ? LogLevel::kWarning : LogLevel::kInfo,
            "group " + facts_.name + " uses the stock backend on GPUs: " + state->why_not);
      }
    }
    device_ = std::move(state);
    if (!transports_.segment) return;
    Fabric::instance().on_tick(transports_.segment.get(), [this, judged = false]() mutable {
      judged = judged || watch_device();
    });
    if (!transports_.nodes) return;
    try {
      agree_on_stages(wait);
      settle_between_nodes(request, wait);
    } catch (const Error& error) {
      state_.fail_operation(error, wait);
    }
  });
}

// NCCL opens many more than shared memory takes. Where it fails on one rank the others wait for
// that rank in its start, and without a segment nothing would tell them.
void Communicator::refuse_without_descriptors(const WaitContext& wait) {
  const std::string mark = "(errno " + std::to_string(EMFILE) + ")";
  if (transports_.segment || transports_.why_none.find(mark) == std::string::npos) return;
  state_.fail_operation(
      Error(DPT_ERR_SYSTEM,
            transports_.why_none + ". NCCL can't start without file descriptors: raise " +
                "`ulimit -n` there"),
      wait);
}

// As the job numbers them.
std::vector<int64_t> Communicator::ranks_here() const {
  if (!transports_.nodes) return facts_.global_ranks;
  std::vector<int64_t> here;
  for (const int rank : transports_.nodes->layout.ranks[transports_.nodes->node()])
    here.push_back(facts_.global_ranks[rank]);
  return here;
}

void Communicator::connect_devices(int device, const WaitContext& wait, DeviceState* state) {
  const auto refuse = [&] { state->why_not = "ranks on several nodes have no GPU kernels"; };
  if (transports_.nodes && !wants_staging_by_nodes(wait)) return refuse();
  Operation none{};
  none.collective = DPT_BARRIER;
  const Plan plan;
  const RunContext here{*transports_.segment, none, plan, wait, WaitStyle::kBackground};
  const DeviceClass devices =
      describe_devices(here, device, ranks_here(), transports_.nodes != nullptr);
  const bool is_apart = !devices.peer_access || here.size() == 1;
  if (transports_.nodes && !are_alike(wait, is_apart)) return refuse();
  const RunContext context{
      *transports_.segment, none, plan, wait, WaitStyle::kBackground, transports_.nodes.get()};
  const auto all_gather = [&](const std::string& mine) {
    Text text{};
    std::strncpy(text.text, mine.c_str(), sizeof text.text - 1);
    std::vector<std::string> all;
    for (const Text& each : exchange(context, text)) all.emplace_back(each.text);
    return all;
  };
  Fabric& fabric = Fabric::instance();
  const size_t most = facts_.staging_bytes != 0 ? facts_.staging_bytes : kDefaultStagingBytes;
  const size_t used = fabric.device_staging_used();
  const size_t left = most - std::min(most, used);
  // If ranks share a GPU, the kernels of all of them may have to find room there.
  const int num_sms = devices.shared ? devices.num_sms / here.size() : devices.num_sms;
  const int channels = offer_channels(num_sms, fabric.device_channels_used(), env().gpu_channels);
  const std::shared_ptr<staged::Between> between =
      transports_.nodes ? bootstrap_.connect_between(wait) : nullptr;
  const auto connect = [&](bool peer_access) {
    DeviceGroup::Setup setup{facts_.rank,
                             facts_.global_ranks,
                             device,
                             left / kShareOfStaging,
                             channels,
                             devices.nvlink,
                             all_gather,
                             wait,
                             peer_access,
                             workers_near(here, devices.cpus),
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
    state->group = DeviceGroup::connect(setup);
    state->staged = state->group->staging().slot_bytes != 0;
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
  device_tuning_.agree_on_device(context, devices.text, !devices.shared);
  state->staging_bytes = state->group->memory_bytes();
  fabric.add_device_use(static_cast<int64_t>(state->staging_bytes),
                        state->group->layout().channels);
}

// Called by all ranks of a node.
DeviceGroup::Workers Communicator::workers_near(const RunContext& context,
                                                const std::vector<int>& cpus) const {
  const int asked = env().reduce_threads;
  const int threads = asked != 0 ? asked : usual_workers(transports_.cores_here / context.size());
  int all = 0;
  for (const int each : exchange(context, threads)) all += each;
  return {threads, cpus, transports_.oversubscribed || all > transports_.cores_here};
}

// From the watchdog's thread, several times a second and after each death. True: there is nothing
// left to watch.
bool Communicator::watch_device() {
  const auto now = std::chrono::steady_clock::now();
  lost_.look(*transports_.segment, now);
  DeviceGroup* const group = device_->group.get();
  if (group == nullptr) return watch_delegate();
  if (transports_.segment->aborted()) {
    group->abort();
  } else if (lost_.is_long_gone(now)) {
    group->stop_waiting();
  }
  const auto failure = group->failure();
  if (!failure) return watch_delegate();
  // A kernel gave up. It holds its stream until here it is decided whether the program may go on
  // with what is unfinished. Who ended the group himself knows that it is.
  const bool wanted = state_.was_aborted();
  const Error error = error_of(*failure);
  state_.fail(error.status(), error.what());
  if (!facts_.raise_errors && !wanted) end_process(begun_with(facts_.explain, error.what()));
  group->release();
  if (!wanted) abandon_delegate();
  return true;
}

// Not where NCCL may yet come to its end. What is divided has a part with NCCL, which waits for the
// same rank as ours; and behind that the program's thread may be held up by a full queue.
void Communicator::abandon_delegate() const {
  if (!facts_.raise_errors || facts_.delegate.abandon == nullptr) return;
  if (is_staged() || !lost_.who().empty()) facts_.delegate.abandon(facts_.delegate.context);
}

// The delegate's kernels wait for a lost rank without end, and NCCL itself looks after minutes.
bool Communicator::watch_delegate() {
  const std::string who = lost_.who();
  if (who.empty() || facts_.delegate.is_waiting == nullptr) return false;
  if (state_.was_aborted()) return true;  // who ended it himself knows
  dpt_waits waits = DPT_WAITS_NOT;
  DeviceGroup::outside_capture(
      device_->device, [&] { waits = facts_.delegate.is_waiting(facts_.delegate.context); });
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

Error Communicator::error_of(const DeviceGroup::Failure& failure) const {
  const std::string peer = "rank " + std::to_string(facts_.global_ranks[failure.peer]);
  const std::string where = "native operation #" + std::to_string(failure.sequence) +
                            " on GPUs of " + facts_.place() + ": ";
  if (failure.kind == DeviceGroup::Failure::kMismatch) {
    return {DPT_ERR_MISMATCH,
            where + peer + " is in another operation, or one of another size or type"};
  }
  // The late rank of another node is known there; here perhaps only whose part is missing.
  const bool is_elsewhere = transports_.nodes && transports_.nodes->layout.node_of[failure.peer] !=
                                                     transports_.nodes->node();
  if (failure.kind == DeviceGroup::Failure::kAborted || is_elsewhere) {
    try {
      transports_.segment->throw_if_aborted();
    } catch (const Error& error) {
      return {error.status(), where + error.what()};
    }
    if (const std::string who = lost_.who(); !who.empty()) {
      return {DPT_ERR_PEER_LOST, where + who};
    }
  }
  // Along trees that one may be waiting as well, for a rank that it alone reaches.
  const bool may_wait = device_->group->wiring() != cuda::Wiring::kAlike;
  return {
      DPT_ERR_TIMEOUT,
      where + peer + (may_wait ? ", or a rank that it waits for," : "") + " did not come in time"};
}

bool Communicator::is_device_broken() const {
  if (!device_ || !device_->group) return false;
  return (is_staged() && transports_.segment->aborted()) || device_->group->failure();
}

void Communicator::check_device(const dpt_request& request) {
  if (!device_ || !device_->group) return;
  // Nothing of this rank may be under way that could tell.
  if (is_staged()) check_segment(request);
  const auto failure = device_->group->failure();
  if (!failure) return;
  const Error error = error_of(*failure);
  state_.fail(error.status(), error.what());
  state_.check_usable(request);
}

// Throws where the group has ended, or a rank is lost.
void Communicator::check_segment(const dpt_request& request) {
  if (!transports_.segment->aborted()) return;
  try {
    transports_.segment->throw_if_aborted();
  } catch (const Error& error) {
    state_.fail(error.status(), error.what());
  }
  state_.check_usable(request);
}

void Communicator::leave_devices() {
  if (!device_) return;
  if (transports_.segment) Fabric::instance().on_tick(transports_.segment.get(), nullptr);
  if (state_.failure()) abandon_delegate();  // the watchdog may not have come to it
  if (!device_->group) return;
  Fabric::instance().add_device_use(-static_cast<int64_t>(device_->staging_bytes),
                                    -device_->group->layout().channels);
  device_.reset();
}

}  // namespace dpt
