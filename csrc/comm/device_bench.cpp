#include "comm/device_bench.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>

#include "algorithms/nodes.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "comm/hybrid.hpp"
#include "comm/measure.hpp"
#include "comm/race.hpp"
#include "staged/job.hpp"
#include "tuner/choose_device.hpp"
#include "tuner/choose_staged.hpp"

namespace dpt {
namespace {

using Clock = std::chrono::steady_clock;

// Times are of the type that models are trained in, and serve all others.
constexpr DataType kType = DPT_BFLOAT16;
// The program may have queued a lot.
constexpr std::chrono::seconds kMostIdling{10};
constexpr std::chrono::microseconds kDevicePoll{20};
// Trials take at most this part of the memory that is free.
constexpr size_t kShareOfMemory = 4;
// A round is as many calls as take this long.
constexpr double kRoundUs = 500;
constexpr int kFirstCalls = 4;
// From here on one call may take longer than that: tens of milliseconds through the host's memory.
// Every candidate's first turn would then cost a good part of the time that a process may spend.
constexpr size_t kLongTrial = 32 << 20;
// Trials of stages between nodes take at most so much memory. On a network of 24 Gbit/s the bytes
// of the largest alone take tens of milliseconds.
constexpr size_t kMostInStages = size_t{128} << 20;
constexpr int kMostCalls = 40;
constexpr Pace kDevicePace{.enough_us = 40e3,
                           .most_us = 120e3,
                           .fewest_rounds = 7,
                           .fewest_long_rounds = 3,
                           .most_rounds = 25,
                           .cheap_us = 0,
                           .long_us = 1000};

// Whether something is much faster than the delegate by the medians, and the spreads hide it. What
// is decided stays, in the profile too.
bool noise_hides_a_gain(const Entry& entry) {
  constexpr double kGain = 1.1;
  const Measurement* const best =
      winner(entry, {.max_chunk_bytes = ~size_t{0}, .delegate = true, .on_device = true});
  return best != nullptr && is_delegate(best->candidate) &&
         std::any_of(entry.begin(), entry.end(), [&](const Measurement& each) {
           return each.median_us * kGain <= best->median_us;
         });
}

// Polls until `done()`; false when `limit` passed first. The group's end and Ctrl-C end it too.
template <typename Done>
bool poll(const RunContext& context, Deadline limit, Done done) {
  auto next_check = Clock::now() + kWaitSlice;
  while (!done()) {
    if (limit.expired()) return false;
    context.segment.throw_if_aborted();
    if (Clock::now() >= next_check) {
      context.wait.check();
      next_check = Clock::now() + kWaitSlice;
    }
    std::this_thread::sleep_for(kDevicePoll);
  }
  return true;
}

// The trial operation, and the ways to put it on the stream.
class DeviceTrial {
 public:
  DeviceTrial(const RunContext& context,
              DeviceTrials& trials,
              DeviceGroup* group,
              const dpt_delegate* delegate)
      : context_(context), trials_(trials), group_(group), delegate_(delegate) {}

  dpt_request request{};
  cuda::Stream stream = nullptr;

  // Without the gate: what the stock backend sets up at its first call may need the device.
  bool try_once(const Candidate& candidate) const {
    trials_.start_clock();
    bool ok = call(candidate);
    trials_.stop_clock();
    ok &= wait_for_clock().has_value();
    return all_agree(ok);
  }

  // How often a candidate is called in its turn.
  struct Calls {
    int timed;
    bool one_before;  // not timed: it lets all ranks begin together
  };
  // The average time of a timed call, on the slowest rank; nothing when it failed on any.
  std::optional<double> run(const Candidate& candidate,
                            const Calls& calls,
                            Clock::time_point start,
                            double* elapsed_us) const {
    trials_.close_gate();
    bool ok = !calls.one_before || call(candidate);
    trials_.start_clock();
    for (int i = 0; i < calls.timed && ok; ++i) ok = call(candidate);
    trials_.stop_clock();
    context_.barrier();
    trials_.open_gate();
    const std::optional<double> time_us = wait_for_clock();
    struct Outcome {
      double time_us;
      double elapsed_us;
      bool failed;
    };
    const std::chrono::duration<double, std::micro> since = Clock::now() - start;
    const std::vector<Outcome> all = exchange(
        context_, Outcome{time_us.value_or(0) / calls.timed, since.count(), !ok || !time_us});
    double slowest = 0;
    bool failed = false;
    for (const Outcome& outcome : all) {
      slowest = std::max(slowest, outcome.time_us);
      failed |= outcome.failed;
    }
    *elapsed_us = all[0].elapsed_us;
    return failed ? std::nullopt : std::optional(slowest);
  }

  bool all_agree(bool ok) const {
    const std::vector<char> all = exchange(context_, static_cast<char>(ok));
    return std::all_of(all.begin(), all.end(), [](char each) { return each != 0; });
  }

 private:
  bool call(const Candidate& candidate) const {
    const WatchedDelegate stock{delegate_, &context_.segment};
    const bool in_stages = is_in_stages(candidate);
    if (!in_stages && !is_delegate(candidate)) {
      const auto failed = [&](const Error& error) {
        context_.segment.abort(error.status(), context_.wait.describe() + ": " + error.what());
      };
      launch_divided(
          *group_, stock, {request, to_device_plan(candidate, "on trial"), stream, failed});
      return true;
    }
    dpt_request whole = request;
    if (in_stages) whole.node_of = context_.nodes->layout.node_of.data();
    dpt_error error{};
    if (stock.execute(whole, &error) == DPT_OK) return true;
    log(LogLevel::kDebug,
        std::string(in_stages ? "in stages " : "") +
            "the stock backend is no candidate: " + error.message);
    return false;
  }

  std::optional<double> wait_for_clock() const {
    std::optional<double> time_us;
    const Deadline limit = context_.wait.deadline;
    if (!poll(context_, limit, [&] { return (time_us = trials_.elapsed_us()).has_value(); })) {
      throw Error(DPT_ERR_TIMEOUT,
                  context_.wait.describe() + ": a trial of it did not end in time");
    }
    return time_us;
  }

  const RunContext& context_;
  DeviceTrials& trials_;
  DeviceGroup* group_;
  const dpt_delegate* delegate_;
};

// A rank can offer this to trials.
struct Offer {
  bool ready;
  uint64_t room;  // bytes
};

}  // namespace

int DeviceBench::tried_for(int bucket) const {
  return is_staged() ? dpt::tried_for(bucket) : bucket;
}

Bench::Result DeviceBench::measure(const RunContext& context, int bucket) {
  if (fails_in_stages_) return {bucket, {}, 0};
  const Collective collective = context.operation.collective;
  const Nodes* const nodes = context.nodes;
  const int rank = nodes != nullptr ? nodes->rank : context.segment.rank();
  const int ranks = nodes != nullptr ? nodes->layout.size() : context.segment.size();
  const cuda::Stream stream = request_.stream(request_.call);
  std::unique_ptr<DeviceTrials> trials;
  Offer offer{};
  try {
    trials = DeviceTrials::on(request_.device, stream);
    offer.ready = poll(context, Deadline(kMostIdling), [&] { return trials->is_idle(); });
    offer.ready = offer.ready && trials->can_queue();
    offer.room = trials->free_bytes() / kShareOfMemory;
  } catch (const Error& error) {
    if (error.status() != DPT_ERR_SYSTEM) throw;
    log(LogLevel::kDebug, std::string("nothing is measured on the GPU: ") + error.what());
  }
  for (const Offer& each : exchange(context, offer)) {
    if (!each.ready) return {bucket, {}, 0};
    offer.room = std::min(offer.room, each.room);
  }
  if (group_ == nullptr) offer.room = std::min(offer.room, kMostInStages);
  const size_t num = num_buffers(collective, ranks);
  while (bucket > 0 && range_of(bucket).nominal * num > offer.room) --bucket;
  const auto known = measured_.find({collective, bucket});
  if (known != measured_.end()) return {bucket, known->second, 0};

  const auto start = Clock::now();
  const size_t bytes = range_of(bucket).nominal;
  DeviceTrial trial(context, *trials, group_, delegate_);
  char* const memory = trials->allocate(trial_bytes(collective, bytes, rank, ranks));
  if (!trial.all_agree(memory != nullptr)) return {bucket, {}, 0};
  const TrialBuffers buffers(collective, bytes, rank, ranks, memory);
  trial.stream = stream;
  trial.request.collective = collective;
  trial.request.dtype = kType;
  trial.request.reduce_op = trial_reduce_op(collective);
  trial.request.premul_factor = 1;
  trial.request.inputs = buffers.inputs.data();
  trial.request.outputs = buffers.outputs.data();
  trial.request.count = bytes / size_of(kType);
  trial.request.timeout_ms = request_.timeout_ms;
  trial.request.on_device = 1;
  trial.request.device = request_.device;
  trial.request.call = request_.call;

  const Candidate stock{AlgorithmName::kDelegate};
  const Candidate in_stages{AlgorithmName::kInStages};
  const auto before = Clock::now();
  const bool has_delegate = delegate_ != nullptr && trial.try_once(stock);
  const bool has_stages = group_ == nullptr && has_delegate && trial.try_once(in_stages);
  const auto connecting = Clock::now() - before;  // the program would wait for it just the same
  std::vector<Candidate> racers;
  if (group_ != nullptr) {
    racers = device_candidates(
        {.collective = collective,
         .bytes = bytes,
         .layout = group_->layout(),
         .wiring = group_->wiring(),
         .not_native = "",
         .delegate = has_delegate,
         .staging = group_->staging(),
         .devices_add = nodes == nullptr &&
                        staged::Job::adds_on_device(collective, kType, trial.request.reduce_op),
         .divisible =
             options_.divides && can_be_divided(collective, kType, trial.request.reduce_op),
         .copies = group_->copies()});
    // All ranks of this group found this together, so they leave out the same.
    const auto smaller = measured_.find({collective, bucket - 1});
    if (smaller != measured_.end()) racers = without_slow_variants(racers, smaller->second);
  } else if (has_stages) {
    racers.push_back(in_stages);
  } else {
    fails_in_stages_ = true;  // setting it up again for the next size would fail as well
    return {bucket, {}, 0};
  }
  if (has_delegate) racers.push_back(stock);
  // An operation in stages is long enough for one call to tell how many make a round.
  const bool is_long = group_ == nullptr || bytes >= kLongTrial;
  std::vector<DeviceTrial::Calls> calls(racers.size(), {is_long ? 1 : kFirstCalls, true});
  const Turn turn = [&](size_t i, Clock::time_point since, double* elapsed) {
    const auto time_us = trial.run(racers[i], calls[i], since, elapsed);
    if (time_us) {
      const double wanted = std::ceil(kRoundUs / std::max(*time_us, 1.0));
      // For a long call it hardly matters how far apart the ranks begin.
      calls[i] = {std::clamp(static_cast<int>(wanted), 1, kMostCalls), *time_us < 2 * kRoundUs};
    }
    return time_us;
  };
  const Entry times = race(racers, kDevicePace, turn, noise_hides_a_gain);
  const auto by_stock = [](const Measurement& each) { return is_delegate(each.candidate); };
  if (group_ == nullptr && std::none_of(times.begin(), times.end(), by_stock)) {
    fails_in_stages_ = true;  // stages are the delegate's own operations, and it has just failed
    return {bucket, {}, 0};
  }
  const std::chrono::duration<double, std::micro> spent = Clock::now() - start - connecting;
  measured_[{collective, bucket}] = times;
  return {bucket, times, spent.count()};
}

}  // namespace dpt
