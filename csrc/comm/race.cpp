#include "comm/race.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "algorithms/algorithm.hpp"

namespace dpt {
namespace {

// A candidate whose best time is this much worse than the best of all is not tried again. The first
// time may have been bad luck.
constexpr double kHopelessAtFirst = 4;
constexpr double kHopeless = 2;
constexpr double kHopelessIfLong = 1.4;

// One candidate's way through the rounds.
struct Course {
  Candidate candidate;
  bool alive = true;
  double best_us = std::numeric_limits<double>::infinity();
  std::vector<double> times_us = {};  // of the timed rounds
};

// The delegate is no yardstick: the best native candidate is always wanted.
void drop_hopeless(std::vector<Course>* courses, double factor, const Pace& pace) {
  double best_us = std::numeric_limits<double>::infinity();
  for (const Course& course : *courses) {
    if (!is_delegate(course.candidate)) best_us = std::min(best_us, course.best_us);
  }
  if (best_us > pace.long_us) factor = kHopelessIfLong;
  for (Course& course : *courses) {
    const bool cheap = !is_delegate(course.candidate) && course.best_us < pace.cheap_us;
    if (!cheap && course.best_us > factor * best_us) course.alive = false;
  }
}

Entry entry_of(const std::vector<Course>& courses) {
  Entry entry;
  for (const Course& course : courses) {
    const bool timed = !course.times_us.empty();
    if (!timed && !std::isfinite(course.best_us)) continue;
    entry.push_back(timed ? summarize(course.candidate, course.times_us)
                          : summarize(course.candidate, {course.best_us}));
  }
  return entry;
}

struct Shape {
  int inputs;
  int outputs;
  bool in_place;
};

// The root is rank 0.
Shape shape_of(Collective collective, int rank, int ranks) {
  const bool is_root = rank == 0;
  return {num_inputs(collective, is_root, ranks),
          num_outputs(collective, is_root, ranks),
          num_buffers(collective, ranks) == 1};
}

}  // namespace

Entry race(const std::vector<Candidate>& candidates,
           const Pace& pace,
           const Turn& turn,
           const Undecided& undecided) {
  std::vector<Course> courses;
  for (const Candidate& candidate : candidates) courses.push_back({candidate});
  double elapsed_us = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round <= pace.most_rounds; ++round) {
    for (size_t i = 0; i < courses.size(); ++i) {
      // Back and forth, so that a drift of the machine's speed hits all alike.
      const size_t index = round % 2 == 0 ? i : courses.size() - 1 - i;
      Course& course = courses[index];
      if (!course.alive) continue;
      const auto time_us = turn(index, start, &elapsed_us);
      course.alive = time_us.has_value();
      if (!time_us) continue;
      course.best_us = std::min(course.best_us, *time_us);
      if (round > 0) course.times_us.push_back(*time_us);
    }
    drop_hopeless(&courses, round == 0 ? kHopelessAtFirst : kHopeless, pace);
    if (round >= pace.fewest_long_rounds && elapsed_us > pace.most_us) break;
    if (round < pace.fewest_rounds || elapsed_us <= pace.enough_us) continue;
    if (!undecided || !undecided(entry_of(courses))) break;
  }
  return entry_of(courses);
}

ReduceOp trial_reduce_op(Collective collective) {
  const bool reduces =
      collective == DPT_ALL_REDUCE || collective == DPT_REDUCE || collective == DPT_REDUCE_SCATTER;
  return reduces ? DPT_SUM : DPT_NO_REDUCE;
}

size_t trial_bytes(Collective collective, size_t bytes, int rank, int ranks) {
  const Shape shape = shape_of(collective, rank, ranks);
  return bytes * (shape.in_place ? 1 : shape.inputs + shape.outputs);
}

TrialBuffers::TrialBuffers(Collective collective, size_t bytes, int rank, int ranks, char* memory) {
  const Shape shape = shape_of(collective, rank, ranks);
  char* next = memory;
  for (int i = 0; i < shape.inputs; ++i, next += bytes) inputs.push_back(next);
  if (shape.in_place) next = memory;
  for (int i = 0; i < shape.outputs; ++i, next += bytes) outputs.push_back(next);
}

}  // namespace dpt
