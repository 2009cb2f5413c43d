#include "comm/measure.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <new>
#include <optional>

#include "algorithms/nodes.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "comm/race.hpp"
#include "tuner/choose.hpp"

namespace dpt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Pace kPace{.enough_us = 20e3,
                     .most_us = 100e3,
                     .fewest_rounds = 3,
                     .fewest_long_rounds = 2,
                     .most_rounds = 25,
                     .cheap_us = 1000,
                     .long_us = std::numeric_limits<double>::infinity()};

// Written once so that its pages are there.
class HostMemory {
 public:
  explicit HostMemory(size_t bytes)
      : memory_(static_cast<char*>(::operator new(bytes, kAlignment, std::nothrow))) {
    if (memory_ != nullptr) std::memset(memory_, 0, bytes);
  }
  ~HostMemory() { ::operator delete(memory_, kAlignment); }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  char* get() const { return memory_; }

 private:
  static constexpr std::align_val_t kAlignment{4096};

  char* memory_;
};

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// One trial operation, by any candidate.
class HostTrial {
 public:
  HostTrial(const RunContext& context, Operation operation, const dpt_delegate* delegate)
      : context_(context), operation_(operation), delegate_(delegate) {}

  // Every rank's time, of which the slowest counts, in microseconds; nothing when it failed on any.
  // `elapsed_us` becomes rank 0's time since `start`.
  std::optional<double> run(const Candidate& candidate,
                            Clock::time_point start,
                            double* elapsed_us) const {
    struct Outcome {
      double time_us;
      double elapsed_us;
      bool failed;
    };
    const auto begin = Clock::now();
    const bool ok = is_delegate(candidate) ? run_delegate() : run_native(candidate);
    const Outcome mine{microseconds_since(begin), microseconds_since(start), !ok};
    double slowest = 0;
    bool failed = false;
    const std::vector<Outcome> all = exchange(context_, mine);
    for (const Outcome& outcome : all) {
      slowest = std::max(slowest, outcome.time_us);
      failed |= outcome.failed;
    }
    *elapsed_us = all[0].elapsed_us;
    return failed ? std::nullopt : std::optional(slowest);
  }

 private:
  bool run_native(const Candidate& candidate) const {
    const Algorithm* algorithm = find_algorithm(candidate.algorithm, operation_.collective);
    DPT_CHECK(algorithm != nullptr);
    const Plan plan{candidate.algorithm, candidate.chunk_bytes, "on trial"};
    algorithm->run(
        {context_.segment, operation_, plan, context_.wait, context_.style, context_.nodes});
    return true;
  }

  bool run_delegate() const {
    dpt_request request{};
    request.collective = operation_.collective;
    request.dtype = operation_.dtype;
    request.reduce_op = operation_.reduce_op;
    request.premul_factor = operation_.premul_factor;
    request.root = operation_.root;
    request.inputs = operation_.inputs;
    request.outputs = operation_.outputs;
    request.count = operation_.count;
    request.timeout_ms = context_.wait.deadline.timeout().count();
    dpt_error error{};
    if (delegate_->execute(delegate_->context, &request, &error) == DPT_OK) return true;
    log(LogLevel::kDebug, std::string("the stock backend is no candidate: ") + error.message);
    return false;
  }

  const RunContext& context_;
  Operation operation_;
  const dpt_delegate* delegate_;
};

}  // namespace

std::vector<char> exchange_bytes(const RunContext& context, const void* mine, size_t bytes) {
  Segment& segment = context.segment;
  context.barrier();
  std::memcpy(segment.small(segment.rank(), 0), mine, bytes);
  std::vector<char> all;
  if (context.nodes == nullptr) {
    context.barrier();
    for (int rank = 0; rank < segment.size(); ++rank) {
      all.insert(all.end(), segment.small(rank, 0), segment.small(rank, 0) + bytes);
    }
  } else {
    const NodeLayout& layout = context.nodes->layout;
    enter_nodes(
        context,
        {.words =
             [&] {
               std::vector<char> words;
               for (int rank = 0; rank < segment.size(); ++rank) {
                 words.insert(words.end(), segment.small(rank, 0), segment.small(rank, 0) + bytes);
               }
               return words;
             },
         .publish =
             [&](const std::vector<std::string_view>& words) {
               for (int rank = 0; rank < layout.size(); ++rank) {
                 std::memcpy(segment.small(0, 0) + rank * bytes,
                             words[layout.node_of[rank]].data() + layout.local_of[rank] * bytes,
                             bytes);
               }
             }});
    all.assign(segment.small(0, 0), segment.small(0, 0) + layout.size() * bytes);
  }
  context.barrier();
  return all;
}

Bench::Result HostBench::measure(const RunContext& context, int bucket) {
  const auto start = Clock::now();
  const size_t bytes = range_of(bucket).nominal;
  const Collective collective = context.operation.collective;
  std::vector<Candidate> racers = candidates({.collective = collective,
                                              .bytes = bytes,
                                              .size = group_.ranks,
                                              .not_native = "",
                                              .max_chunk_bytes = context.segment.max_chunk_bytes(),
                                              .oversubscribed = group_.oversubscribed,
                                              .nodes = group_.nodes});
  const Nodes* nodes = context.nodes;
  const int rank = nodes != nullptr ? nodes->rank : context.segment.rank();
  const HostMemory memory(trial_bytes(collective, bytes, rank, group_.ranks));
  struct Ready {
    bool has_memory;
  };
  for (const Ready& each : exchange(context, Ready{memory.get() != nullptr})) {
    if (!each.has_memory) return {bucket, {}, microseconds_since(start)};
  }
  const TrialBuffers buffers(collective, bytes, rank, group_.ranks, memory.get());
  Operation operation{};
  operation.collective = collective;
  operation.dtype = DPT_FLOAT32;
  operation.reduce_op = trial_reduce_op(collective);
  operation.premul_factor = 1;
  operation.count = bytes / size_of(DPT_FLOAT32);
  operation.inputs = buffers.inputs.data();
  operation.outputs = buffers.outputs.data();
  operation.sequence = context.operation.sequence;
  const HostTrial trial(context, operation, delegate_);

  double elapsed_us = 0;
  if (delegate_ != nullptr) {
    // It connects at its first operation, which is no fair sample.
    const Candidate stock{AlgorithmName::kDelegate};
    if (trial.run(stock, Clock::now(), &elapsed_us)) racers.push_back(stock);
  }
  const Entry times = race(racers, kPace, [&](size_t i, Clock::time_point since, double* elapsed) {
    return trial.run(racers[i], since, elapsed);
  });
  return {bucket, times, microseconds_since(start)};
}

}  // namespace dpt
