#include "comm/measure.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <new>
#include <optional>

#include "algorithms/nodes.hpp"
#include "base/error.hpp"
#include "base/log.hpp"

namespace dpt {
namespace {

using Clock = std::chrono::steady_clock;

// One range has enough when it had this long and this many rounds, and stops at the latest after
// the longer time or the larger number.
constexpr double kEnoughUs = 20e3;
constexpr double kMostUs = 100e3;
constexpr int kFewestRounds = 3;
constexpr int kFewestLongRounds = 2;
constexpr int kMostRounds = 25;
// A candidate whose best time is this much worse than the best of all is not tried again. The first
// time may have been bad luck; native ones that cost next to nothing get all their chances.
constexpr double kHopelessAtFirst = 4;
constexpr double kHopeless = 2;
constexpr double kCheapUs = 1000;

// Memory for one trial operation, written once so that its pages are there.
class Scratch {
 public:
  static constexpr std::align_val_t kAlignment{4096};

  Scratch(Collective collective, size_t bytes, int rank, int ranks) {
    const bool is_root = rank == 0;
    const int inputs = num_inputs(collective, is_root, ranks);
    const int outputs = num_outputs(collective, is_root, ranks);
    const bool in_place = num_buffers(collective, ranks) == 1;
    const size_t all = bytes * (in_place ? 1 : inputs + outputs);
    memory_ = static_cast<char*>(::operator new(all, kAlignment, std::nothrow));
    if (memory_ == nullptr) return;
    std::memset(memory_, 0, all);
    char* next = memory_;
    for (int i = 0; i < inputs; ++i, next += bytes) this->inputs.push_back(next);
    if (in_place) next = memory_;
    for (int i = 0; i < outputs; ++i, next += bytes) this->outputs.push_back(next);
  }
  ~Scratch() { ::operator delete(memory_, kAlignment); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  bool has_memory() const { return memory_ != nullptr; }

  std::vector<const void*> inputs;
  std::vector<void*> outputs;

 private:
  char* memory_;
};

ReduceOp trial_reduce_op(Collective collective) {
  const bool reduces =
      collective == DPT_ALL_REDUCE || collective == DPT_REDUCE || collective == DPT_REDUCE_SCATTER;
  return reduces ? DPT_SUM : DPT_NO_REDUCE;
}

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// One trial operation, by any candidate.
class Trial {
 public:
  Trial(const RunContext& context, Operation operation, const dpt_delegate* delegate)
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

// One candidate's way through the rounds.
struct Course {
  Candidate candidate;
  bool alive = true;
  double best_us = std::numeric_limits<double>::infinity();
  std::vector<double> times_us = {};  // of the timed rounds
};

// The delegate is no yardstick: the best native candidate is always wanted.
void drop_hopeless(std::vector<Course>* courses, double factor) {
  double best_us = std::numeric_limits<double>::infinity();
  for (const Course& course : *courses) {
    if (!is_delegate(course.candidate)) best_us = std::min(best_us, course.best_us);
  }
  for (Course& course : *courses) {
    const bool cheap = !is_delegate(course.candidate) && course.best_us < kCheapUs;
    if (!cheap && course.best_us > factor * best_us) course.alive = false;
  }
}

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

Entry measure(const RunContext& context, const Trials& what, const dpt_delegate* delegate) {
  const size_t bytes = what.bytes;
  const Collective collective = context.operation.collective;
  const Nodes* nodes = context.nodes;
  const Scratch scratch(collective,
                        bytes,
                        nodes != nullptr ? nodes->rank : context.segment.rank(),
                        nodes != nullptr ? nodes->layout.size() : context.segment.size());
  struct Ready {
    bool has_memory;
  };
  for (const Ready& rank : exchange(context, Ready{scratch.has_memory()})) {
    if (!rank.has_memory) return {};
  }
  Operation operation{};
  operation.collective = collective;
  operation.dtype = DPT_FLOAT32;
  operation.reduce_op = trial_reduce_op(collective);
  operation.premul_factor = 1;
  operation.count = bytes / size_of(DPT_FLOAT32);
  operation.inputs = scratch.inputs.data();
  operation.outputs = scratch.outputs.data();
  operation.sequence = context.operation.sequence;
  const Trial trial(context, operation, delegate);

  std::vector<Course> courses;
  for (const Candidate& candidate : what.plans) courses.push_back({candidate});
  double elapsed_us = 0;
  if (delegate != nullptr) {
    courses.push_back({{known_algorithm("delegate")}});
    // It connects at its first operation, which is no fair sample.
    courses.back().alive =
        trial.run(courses.back().candidate, Clock::now(), &elapsed_us).has_value();
  }
  const auto start = Clock::now();
  // The first round is not timed.
  for (int round = 0; round <= kMostRounds; ++round) {
    for (size_t i = 0; i < courses.size(); ++i) {
      // Back and forth, so that a drift of the machine's speed hits all alike.
      Course& course = courses[round % 2 == 0 ? i : courses.size() - 1 - i];
      if (!course.alive) continue;
      const auto time_us = trial.run(course.candidate, start, &elapsed_us);
      course.alive = time_us.has_value();
      if (!time_us) continue;
      course.best_us = std::min(course.best_us, *time_us);
      if (round > 0) course.times_us.push_back(*time_us);
    }
    drop_hopeless(&courses, round == 0 ? kHopelessAtFirst : kHopeless);
    if (round >= kFewestLongRounds && elapsed_us > kMostUs) break;
    if (round >= kFewestRounds && elapsed_us > kEnoughUs) break;
  }
  Entry entry;
  for (Course& course : courses) {
    const bool timed = !course.times_us.empty();
    if (!timed && !std::isfinite(course.best_us)) continue;
    entry.push_back(timed ? summarize(course.candidate, course.times_us)
                          : summarize(course.candidate, {course.best_us}));
  }
  return entry;
}

}  // namespace dpt
