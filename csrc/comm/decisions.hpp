// Knowledge of this process about the speed of plans, shared by all of its groups. It consists of
// times measured in this process, those of the profile, and what the groups decided from them.
//
// Lifecycle: made at the first use, never destroyed. Thread safety: any thread.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.hpp"
#include "tuner/choose.hpp"
#include "tuner/table.hpp"

namespace dpt {

// A decision in force, for reports.
struct DecisionRow {
  TuningClass group;
  Collective collective;
  SizeRange bytes;
  Decision decision;
};

class Decisions {
 public:
  static Decisions& instance();

  // Times measured in this process; empty when there are none.
  Entry measured(TuningClass group, Collective collective, int bucket) const;
  // The measured bucket of this collective nearest to `bucket`, and its times.
  std::optional<std::pair<int, Entry>> nearest(TuningClass group,
                                               Collective collective,
                                               int bucket) const;
  void add_measured(TuningClass group, Collective collective, int bucket, const Entry& times);

  // Times of the profile at `path`, read once. A malformed profile is reported once, and then left
  // alone.
  Entry in_profile(const std::string& path, TuningClass group, Collective collective, int bucket);
  // Puts this process's measurements of the class into the profile. Where that can't be done the
  // run goes on without, and does not try again.
  void save(const std::string& path, TuningClass group);

  // Time spent measuring, in microseconds.
  double spent_us() const;
  void add_spent_us(double time_us);
  // Measuring stops for good in a process that spent this much on it.
  double budget_us() const;
  // For tests: a busy machine spends any budget of real time sooner or later.
  void set_budget_us(double time_us);

  void add(const DecisionRow& row);
  // The last decision for each class, collective and range.
  std::vector<DecisionRow> rows() const;

  // Forgets everything but the budget, as a new process would; for tests.
  void reset();

 private:
  struct Profile {
    std::string text;
    bool usable = true;
    bool writable = true;
    std::map<TuningClass, TimingTable> tables;
  };
  Profile& profile_at(const std::string& path);
  static void ignore(Profile& profile, const std::string& path, const Error& error);

  mutable std::mutex mutex_;
  std::map<TuningClass, TimingTable> measured_;
  std::map<std::string, Profile> profiles_;
  std::map<std::tuple<TuningClass, Collective, size_t>, DecisionRow> rows_;
  double spent_us_ = 0;
  double budget_us_ = 3e6;
};

}  // namespace dpt
