// The communicator's part on GPUs: joining their memory at the first operation, then one kernel per
// operation on the caller's stream.
#include <cstring>

#include "base/log.hpp"
#include "comm/communicator.hpp"
#include "comm/device_bench.hpp"
#include "comm/device_class.hpp"
#include "comm/end_process.hpp"
#include "comm/fabric.hpp"
#include "comm/measure.hpp"
#include "tuner/choose_device.hpp"

namespace dpt {
namespace {

constexpr size_t kDefaultStagingBytes = size_t{256} << 20;
// Of what is left, one group gets at most this part: there is always some for the next.
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
  std::unique_lock order(submit_mutex_);
  check_usable(request);
  check_device(request);
  *recorded = record(request);
  DevicePlan plan = plan_on_device(request);
  if (std::strcmp(plan.algorithm, "delegate") == 0) {
    order.unlock();
    return start_on_delegate(request, {.reason = std::move(plan.reason)}, *recorded);
  }
  FlightRecord::instance().note(*recorded, FlightRecord::kNative);
  device_->group->launch(request, plan, request.stream(request.call));
  statistics_->add(request.collective,
                   plan.algorithm,
                   plan.reason.c_str(),
                   request.count * size_of(request.dtype),
                   0);
  return DPT_COMPLETED;
}

std::string Communicator::why_not_on_device(const dpt_request& request) const {
  if (std::string reason = why_never_native(request); !reason.empty()) return reason;
  if (global_ranks_.size() == 1) return "a group of one rank";
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

DevicePlan Communicator::plan_on_device(const dpt_request& request) {
  std::string reason = why_not_on_device(request);
  if (reason.empty()) {
    join_devices(request);
    reason = device_->why_not;
    if (reason.empty() && device_->device != request.device) {
      reason = "the group's GPU on this rank is number " + std::to_string(device_->device);
    }
  }
  const bool even = request.input_counts == nullptr && request.output_counts == nullptr;
  const size_t bytes = request.count * size_of(request.dtype);
  const bool tunes = reason.empty() && even;
  if (tunes && device_tuning_.is_open(request.collective, bytes)) settle_on_device(request, bytes);
  return choose_device({.collective = request.collective,
                        .bytes = bytes,
                        .even = even,
                        .large = request.reduce_op == DPT_NO_REDUCE ||
                                 cuda::has_large_kernels(request.dtype, request.reduce_op),
                        .layout = reason.empty() ? device_->group->layout() : cuda::Layout{},
                        .not_native = std::move(reason),
                        .delegate = device_tuning_.delegate_competes(),
                        .tuned = tunes ? device_tuning_.find(request.collective, bytes) : nullptr});
}

void Communicator::run_in_turn(const dpt_request& request,
                               const std::function<void(const WaitContext&)>& task) {
  const WaitContext wait{Deadline(std::chrono::milliseconds(request.timeout_ms)),
                         [this, &request] {
                           return std::string(name_of(request.collective)) +
                                  " (on GPUs, the first of its kind) of group " + group_name_ +
                                  " on rank " + std::to_string(global_ranks_[rank_]);
                         },
                         interrupted_};
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
                            .sequence = next_sequence_++};
  const Plan plan;
  run_in_turn(request, [&](const WaitContext& wait) {
    DeviceBench bench(*device_->group, request, device_tuning_.rival());
    try {
      device_tuning_.settle(
          {*segment_, operation, plan, wait, WaitStyle::kBackground}, bytes, bench);
    } catch (const Error& error) {
      fail_operation(error, wait);
    }
  });
}

void Communicator::join_devices(const dpt_request& request) {
  if (device_) return;
  run_in_turn(request, [&](const WaitContext& wait) {
    ensure_connected(wait, *store_);
    auto state = std::make_unique<DeviceState>();
    state->device = request.device;
    state->why_not = nodes_ ? "ranks on several nodes have no GPU kernels yet" : no_transport_;
    if (segment_ && !nodes_) {
      try {
        connect_devices(request.device, wait, state.get());
      } catch (const Error& error) {
        if (error.status() != DPT_ERR_SYSTEM) fail_operation(error, wait);
        state->why_not = error.what();
        // Only who asked for native code misses anything.
        log(delegate_.execute == nullptr ? LogLevel::kWarning : LogLevel::kInfo,
            "group " + group_name_ + " uses the stock backend on GPUs: " + state->why_not);
      }
    }
    device_ = std::move(state);
  });
}

void Communicator::connect_devices(int device, const WaitContext& wait, DeviceState* state) {
  Operation none{};
  none.collective = DPT_BARRIER;
  const Plan plan;
  const RunContext context{*segment_, none, plan, wait, WaitStyle::kBackground};
  const auto all_gather = [&](const std::string& mine) {
    Text text{};
    std::strncpy(text.text, mine.c_str(), sizeof text.text - 1);
    std::vector<std::string> all;
    for (const Text& each : exchange(context, text)) all.emplace_back(each.text);
    return all;
  };
  Fabric& fabric = Fabric::instance();
  const size_t most = staging_bytes_ != 0 ? staging_bytes_ : kDefaultStagingBytes;
  const size_t used = fabric.device_staging_used();
  const size_t left = most - std::min(most, used);
  const DeviceClass devices = describe_devices(context, device);
  const int channels = offer_channels(devices.num_sms, fabric.device_channels_used());
  // Packets have not run on GPUs since they last changed, so nobody gets them without asking for
  // native code.
  const bool packets_are_asked_for = delegate_.execute == nullptr;
  state->group = DeviceGroup::connect({rank_,
                                       global_ranks_,
                                       device,
                                       left / kShareOfStaging,
                                       channels,
                                       devices.nvlink && packets_are_asked_for,
                                       all_gather,
                                       wait});
  // NCCL refuses ranks that share a GPU.
  device_tuning_.agree_on_device(context, devices.text, !devices.shared);
  state->staging_bytes = state->group->layout().block_bytes();
  fabric.add_device_use(static_cast<int64_t>(state->staging_bytes),
                        state->group->layout().channels);
  fabric.on_tick(segment_.get(), [this, group = state->group.get(), judged = false]() mutable {
    judged = judged || watch_device(group);
  });
}

// From the watchdog's thread, several times a second and after each death. True: there is nothing
// left to watch.
bool Communicator::watch_device(DeviceGroup* group) {
  if (segment_->aborted()) group->abort();
  const auto failure = group->failure();
  if (!failure) return false;
  // A kernel gave up. It holds its stream until here it is decided whether the program may go on
  // with what is unfinished. Who ended the group himself knows that it is.
  bool wanted = false;
  {
    std::lock_guard lock(state_mutex_);
    wanted = failure_ && failure_->status() == DPT_ERR_ABORTED;
  }
  const Error error = error_of(*failure);
  fail(error.status(), error.what());
  if (!raise_errors_ && !wanted) end_process(error.what());
  group->release();
  return true;
}

Error Communicator::error_of(const DeviceGroup::Failure& failure) const {
  const std::string peer = "rank " + std::to_string(global_ranks_[failure.peer]);
  const std::string where = "native operation #" + std::to_string(failure.sequence) +
                            " on GPUs of group " + group_name_ + " on rank " +
                            std::to_string(global_ranks_[rank_]) + ": ";
  if (failure.kind == DeviceGroup::Failure::kMismatch) {
    return {DPT_ERR_MISMATCH,
            where + peer + " is in another operation, or one of another size or type"};
  }
  if (failure.kind == DeviceGroup::Failure::kAborted) {
    try {
      segment_->throw_if_aborted();
    } catch (const Error& error) {
      return {error.status(), where + error.what()};
    }
  }
  return {DPT_ERR_TIMEOUT, where + peer + " did not come in time"};
}

void Communicator::check_device(const dpt_request& request) {
  if (!device_ || !device_->group) return;
  const auto failure = device_->group->failure();
  if (!failure) return;
  const Error error = error_of(*failure);
  fail(error.status(), error.what());
  check_usable(request);
}

void Communicator::leave_devices() {
  if (!device_ || !device_->group) return;
  Fabric::instance().on_tick(segment_.get(), nullptr);
  Fabric::instance().add_device_use(-static_cast<int64_t>(device_->staging_bytes),
                                    -device_->group->layout().channels);
  device_.reset();
}

}  // namespace dpt
