// Tries candidates against each other, wherever they run. In each round every candidate has its
// turn, on scratch memory. The rounds go on until the candidates' times are known well enough.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "tuner/table.hpp"

namespace dpt {

// One range of sizes has enough when it had `enough_us` and `fewest_rounds`. It stops at the latest
// after `most_rounds`, or after `most_us` and `fewest_long_rounds`.
struct Pace {
  double enough_us;
  double most_us;
  int fewest_rounds;
  int fewest_long_rounds;
  int most_rounds;
  double cheap_us;  // native candidates that take less get all their chances
  double long_us;   // where the best takes longer, one time tells more and costs more
};

// Lets the candidate of that index have a turn: its time in microseconds, the slowest rank's, or
// nothing when it failed on any. `elapsed_us` becomes rank 0's time since `start`. All ranks get
// the same, so they go through the same rounds.
using Turn = std::function<std::optional<double>(
    size_t index, std::chrono::steady_clock::time_point start, double* elapsed_us)>;

// Whether what is known by now shows no winner where there may be one; then it goes on as long as
// the pace allows.
using Undecided = std::function<bool(const Entry& entry)>;

// The first round is not timed.
Entry race(const std::vector<Candidate>& candidates,
           const Pace& pace,
           const Turn& turn,
           const Undecided& undecided = nullptr);

ReduceOp trial_reduce_op(Collective collective);

// Memory for one trial operation of buffers of `bytes`, and how it is cut.
size_t trial_bytes(Collective collective, size_t bytes, int rank, int ranks);
struct TrialBuffers {
  TrialBuffers(Collective collective, size_t bytes, int rank, int ranks, char* memory);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
};

}  // namespace dpt
