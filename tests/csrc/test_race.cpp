// Candidates on trial: how long a race goes on.
#include <gtest/gtest.h>

#include "comm/race.hpp"

namespace dpt::testing {
namespace {

constexpr Pace kPace{.enough_us = 1000,
                     .most_us = 3000,
                     .fewest_rounds = 5,
                     .fewest_long_rounds = 2,
                     .most_rounds = 100,
                     .cheap_us = 0,
                     .long_us = 500};

std::vector<Candidate> racers() {
  return {{AlgorithmName::kTwoShot, 0, 32, 512},
          {AlgorithmName::kTwoShot, 0, 16, 512},
          {AlgorithmName::kDelegate}};
}

// The time that each took, and how often each was called.
struct Outcome {
  Entry entry;
  std::vector<int> turns;
};

// A turn of candidate i takes `time_us(i, its turns before)`.
Outcome race_of(const std::function<double(size_t, int)>& time_us,
                const Undecided& undecided = nullptr) {
  Outcome outcome{.entry = {}, .turns = std::vector<int>(3)};
  double now_us = 0;
  const Turn turn = [&](size_t i, std::chrono::steady_clock::time_point, double* elapsed_us) {
    const double taken_us = time_us(i, outcome.turns[i]++);
    *elapsed_us = now_us += taken_us;
    return std::optional(taken_us);
  };
  outcome.entry = race(racers(), kPace, turn, undecided);
  return outcome;
}

TEST(Race, EndsWithTheRoundThatMakesItEnough) {
  const Outcome outcome = race_of([](size_t, int) { return 50.0; });
  EXPECT_EQ(outcome.turns, std::vector<int>({7, 7, 7}));  // the first is not timed
  EXPECT_EQ(outcome.entry.size(), 3);
}

TEST(Race, GoesOnWhileNothingIsDecidedUpToTheMost) {
  const auto steady = [](size_t, int) { return 50.0; };
  EXPECT_EQ(race_of(steady, [](const Entry&) { return true; }).turns[0], 21);
  int asked = 0;
  const auto decided_later = [&](const Entry& entry) {
    EXPECT_EQ(entry.size(), 3);
    return ++asked < 4;
  };
  EXPECT_EQ(race_of(steady, decided_later).turns[0], 7 + 3);
}

TEST(Race, WhatIsHopelessGetsFewTurns) {
  const Outcome outcome = race_of([](size_t i, int) { return i == 1 ? 120.0 : 50.0; });
  EXPECT_EQ(outcome.turns[1], 2);  // more than twice as slow, when it was timed
  EXPECT_GT(outcome.turns[0], 5);
  EXPECT_EQ(outcome.entry.size(), 3);  // its time is known all the same
}

TEST(Race, OfLongOnesTheFirstTurnTellsMore) {
  const auto time_us = [](size_t i, int) { return i == 1 ? 900.0 : 600.0; };
  EXPECT_EQ(race_of(time_us).turns, std::vector<int>({3, 1, 3}));
}

// The delegate is no yardstick.
TEST(Race, TheBestNativeOneIsWantedHoweverFastTheDelegateIs) {
  const Outcome outcome = race_of([](size_t i, int) { return i == 2 ? 5.0 : 50.0; });
  EXPECT_EQ(outcome.turns[0], outcome.turns[2]);
}

}  // namespace
}  // namespace dpt::testing
