#include "comm/calibration.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "algorithms/nodes.hpp"
#include "base/env.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "comm/measure.hpp"
#include "comm/rendezvous.hpp"
#include "tuner/choose_device.hpp"

namespace dpt {
namespace {

// On top of the operation's own timeout, which is meant for the operation.
constexpr std::chrono::seconds kExtraTime{10};
// How long a rank that is in an operation on a GPU, where nobody expects to wait, waits for others.
constexpr std::chrono::milliseconds kMostWaiting{30000};
// A group that is busy whenever it could measure gets by without, and without asking again.
constexpr int kMostTimesBusy = 64;

// An Entry as it crosses process borders.
struct SharedEntry {
  struct Time {
    AlgorithmName algorithm;
    uint64_t chunk_bytes;
    int32_t channels;
    int32_t threads;
    int32_t delegated;
    float median_us;
    float low_us;
    float high_us;
  };
  uint32_t size;
  Time times[kMostDeviceCandidates + 1];  // and the delegate
};

SharedEntry to_shared(const Entry& entry) {
  SharedEntry shared{};
  for (const Measurement& measurement : entry) {
    if (shared.size == std::size(shared.times)) break;
    SharedEntry::Time& time = shared.times[shared.size++];
    time.algorithm = measurement.candidate.algorithm;
    time.chunk_bytes = measurement.candidate.chunk_bytes;
    time.channels = measurement.candidate.channels;
    time.threads = measurement.candidate.threads;
    time.delegated = measurement.candidate.delegated;
    time.median_us = static_cast<float>(measurement.median_us);
    time.low_us = static_cast<float>(measurement.low_us);
    time.high_us = static_cast<float>(measurement.high_us);
  }
  return shared;
}

Entry from_shared(const SharedEntry& shared) {
  Entry entry;
  for (uint32_t i = 0; i < shared.size; ++i) {
    const SharedEntry::Time& time = shared.times[i];
    entry.push_back(
        {{time.algorithm, time.chunk_bytes, time.channels, time.threads, time.delegated},
         time.median_us,
         time.low_us,
         time.high_us});
  }
  return entry;
}

std::string size_of_range(int bucket) { return describe_bytes(range_of(bucket).nominal); }

}  // namespace

// One rank brings this to a range that is open; rank 0's counts, but for `spent_us`.
struct GroupTuning::Proposal {
  bool busy;        // on any rank: nothing is settled now
  bool measure;     // if the budget allows; else, or with the budget spent, `entry`
  double spent_us;  // by this rank's process
  char found[24];   // how the plan's reason says where `entry` comes from
  char source[160];
  SharedEntry entry;  // may be empty
};

GroupTuning::GroupTuning(const dpt_comm_options& options, const dpt_delegate& delegate)
    : tune_(options.tune),
      profile_(options.profile == nullptr ? "" : options.profile),
      delegate_(delegate) {}

void GroupTuning::agree(Segment& segment,
                        Nodes* nodes,
                        bool oversubscribed,
                        const WaitContext& wait) {
  if (nodes != nullptr && nodes->layout.size() > kMostMeasuringRanks) return;  // the rule of thumb
  Operation none{};
  none.collective = DPT_BARRIER;
  const Plan plan;
  const RunContext context{segment, none, plan, wait, WaitStyle::kBackground, nodes};
  group_.nodes = nodes != nullptr ? nodes->num_nodes() : 1;
  agree_on(context, {tune_, env().chunk_bytes == 0, delegate_.execute != nullptr, oversubscribed});
}

void GroupTuning::agree_on_device(const RunContext& context,
                                  std::string_view device,
                                  bool delegate) {
  group_.device = device;
  group_.nodes = context.nodes != nullptr ? context.nodes->layout.num_nodes() : 1;
  agree_on(context, {tune_, true, delegate && delegate_.execute != nullptr, false});
}

void GroupTuning::agree_on(const RunContext& context, const Terms& mine) {
  const std::vector<Terms> all = exchange(context, mine);
  tune_ = all[0].tune;
  group_.ranks = static_cast<int>(all.size());
  delegate_competes_ = true;
  measures_ = tune_ != DPT_TUNE_OFF;
  for (const Terms& rank : all) {
    delegate_competes_ &= rank.delegate;
    measures_ &= rank.measures;
    group_.oversubscribed |= rank.oversubscribed;
  }
}

Limits GroupTuning::limits(const Segment& segment) const {
  const bool on_device = group_.on_device();
  const size_t most = on_device ? std::numeric_limits<size_t>::max() : segment.max_chunk_bytes();
  return {most, delegate_competes_, on_device};
}

bool GroupTuning::is_open(Collective collective, size_t bytes) const {
  if (!measures_) return false;
  const auto bucket = bucket_of(collective, bytes, group_);
  return bucket && settled_[collective][*bucket].load(std::memory_order_acquire) == nullptr;
}

const Decision* GroupTuning::find(Collective collective, size_t bytes) const {
  if (!measures_) return nullptr;
  const auto bucket = bucket_of(collective, bytes, group_);
  return bucket ? settled_[collective][*bucket].load(std::memory_order_acquire) : nullptr;
}

GroupTuning::Proposal GroupTuning::propose(const Operation& operation,
                                           int bucket,
                                           const Segment& segment) const {
  const Collective collective = operation.collective;
  Decisions& decisions = Decisions::instance();
  Proposal proposal{};
  proposal.spent_us = decisions.spent_us();
  const auto offer = [&](const Entry& entry, const std::string& found, const std::string& source) {
    proposal.entry = to_shared(entry);
    std::strncpy(proposal.found, found.c_str(), sizeof proposal.found - 1);
    std::strncpy(proposal.source, source.c_str(), sizeof proposal.source - 1);
  };
  Limits native = limits(segment);
  native.delegate = false;
  // Times without the delegate's can't show that native code is no slower.
  const auto complete = [&](const Entry& entry) {
    if (winner(entry, native) == nullptr) return false;
    return !delegate_competes_ || tune_ == DPT_TUNE_PROFILE ||
           std::any_of(entry.begin(), entry.end(), [](const Measurement& measurement) {
             return is_delegate(measurement.candidate);
           });
  };
  Entry entry = decisions.measured(group_, collective, bucket);
  if (tune_ != DPT_TUNE_PROFILE && complete(entry)) {
    offer(entry, "measured", "measured in this run");
    return proposal;
  }
  // A profile is of a machine, and says nothing of the network between several.
  if (tune_ != DPT_TUNE_FORCE && group_.nodes == 1) {
    entry = decisions.in_profile(profile_, group_, collective, bucket);
    // Plans for GPUs are checked where they are made.
    std::erase_if(entry, [&](const Measurement& each) {
      return !group_.on_device() && !could_be_candidate(each.candidate, collective, group_.nodes);
    });
    if (complete(entry)) {
      offer(entry, "in the profile", "profile " + profile_);
      return proposal;
    }
  }
  if (tune_ == DPT_TUNE_PROFILE) return proposal;
  // A late group whose slots are small would measure a part of the candidates, for everybody.
  proposal.measure = native.max_chunk_bytes >= Segment::kMaxChunkBytes;
  const auto near = decisions.nearest(group_, collective, bucket);
  // On the device the delegate does well at large sizes, whatever is faster at much smaller ones.
  // Between nodes the network decides for both.
  const bool serves =
      near && (!group_.on_device() || group_.nodes > 1 || std::abs(near->first - bucket) <= 1);
  if (serves) {
    const std::string size = size_of_range(near->first);
    offer(near->second, "at " + size, "measured at " + size + " in this run, the budget is spent");
  }
  return proposal;
}

void GroupTuning::settle(const RunContext& context, size_t bytes, Bench& bench) {
  const Operation& operation = context.operation;
  const auto bucket = bucket_of(operation.collective, bytes, group_);
  DPT_CHECK(bucket.has_value());
  context.segment.throw_if_aborted();
  if (group_.on_device() && context.nodes == nullptr && !all_come(context, *bucket)) {
    Decision apart;
    apart.source = "rule of thumb: ranks come at different times";
    return freeze(operation.collective, *bucket, std::move(apart));
  }
  // Ranks that are in different operations part here, before anything depends on their being alike.
  if (context.nodes != nullptr) {
    enter_nodes(context);
  } else if (group_.on_device()) {
    enter_small(context);
  } else {
    enter(context, {});
  }
  // The operation's timeout has done its duty: everyone is here.
  WaitContext wait = context.wait;
  wait.deadline = Deadline(wait.deadline.timeout() + kExtraTime);
  const RunContext together{
      context.segment, context.operation, context.plan, wait, context.style, context.nodes};

  const int tried = bench.tried_for(*bucket);
  Proposal mine = propose(operation, tried, context.segment);
  mine.busy = bench.is_busy();
  const std::vector<Proposal> all = exchange(together, mine);
  double spent_us = 0;
  bool busy = false;
  for (const Proposal& proposal : all) {
    spent_us = std::max(spent_us, proposal.spent_us);
    busy |= proposal.busy;
  }

  const bool measures = all[0].measure && spent_us < Decisions::instance().budget_us();
  // Known times serve a busy rank too. Without them it gets the rule of thumb, for now.
  if (busy && measures && ++times_busy_ <= kMostTimesBusy) return;

  Decision decision;
  if (measures && !busy) {
    const Bench::Result found = bench.measure(together, tried);
    Decisions& decisions = Decisions::instance();
    decisions.add_spent_us(found.spent_us);
    if (!found.times.empty()) {
      decisions.add_measured(group_, operation.collective, found.bucket, found.times);
      if (context.segment.rank() == 0 && group_.nodes == 1) decisions.save(profile_, group_);
    }
    decision = decide(found.times, limits(context.segment), "measured");
    decision.source = "measured now";
    if (found.bucket != *bucket) decision.source += " at " + size_of_range(found.bucket);
    log(LogLevel::kDebug,
        context.wait.describe() + ": measured " + std::to_string(found.times.size()) +
            " candidates at " + size_of_range(found.bucket) + " in " +
            std::to_string(std::lround(found.spent_us / 1e3)) + " ms");
  } else {
    decision = decide(from_shared(all[0].entry), limits(context.segment), all[0].found);
    decision.source = all[0].source;
  }
  if (!decision.chosen) decision.source = "rule of thumb";
  freeze(operation.collective, *bucket, std::move(decision));
}

bool GroupTuning::all_come(const RunContext& context, int bucket) {
  const int collective = context.operation.collective;
  const int place = collective * kNumBuckets + bucket;
  static_assert(kNumCollectives * kNumBuckets <= Segment::kNumRendezvous);
  if (ranks_came_apart_) {
    decline(context, place);
    return false;
  }
  const Deadline patience(std::min(kMostWaiting, context.wait.deadline.timeout() / 2));
  if (rendezvous(context, place, ++visits_[collective][bucket], patience)) return true;
  ranks_came_apart_ = true;
  log(LogLevel::kInfo,
      context.wait.describe() +
          ": not all ranks came in time to measure it, so nothing of this "
          "group is measured from here on");
  return false;
}

void GroupTuning::freeze(Collective collective, int bucket, Decision decision) {
  Decisions::instance().add({group_, collective, served_by(collective, bucket, group_), decision});
  decisions_.push_back(std::make_unique<const Decision>(std::move(decision)));
  settled_[collective][bucket].store(decisions_.back().get(), std::memory_order_release);
}

}  // namespace dpt
