#include "comm/decisions.hpp"

#include "base/error.hpp"
#include "base/log.hpp"
#include "topology/topology.hpp"
#include "tuner/profile.hpp"

namespace dpt {
namespace {

ProfileKey key_of(TuningClass group) {
  static const std::string machine = describe_machine();
  // Kernels run at the device's own speed, whatever the host is.
  if (group.on_device()) return {std::string(group.device), DPT_VERSION, group};
  return {machine, DPT_VERSION, group};
}

}  // namespace

Decisions& Decisions::instance() {
  static auto* const decisions = new Decisions;
  return *decisions;
}

Entry Decisions::measured(TuningClass group, Collective collective, int bucket) const {
  std::lock_guard lock(mutex_);
  const auto found = measured_.find(group);
  return found == measured_.end() ? Entry{} : found->second.at(collective, bucket);
}

std::optional<std::pair<int, Entry>> Decisions::nearest(TuningClass group,
                                                        Collective collective,
                                                        int bucket) const {
  std::lock_guard lock(mutex_);
  const auto found = measured_.find(group);
  if (found == measured_.end()) return std::nullopt;
  const auto other = found->second.nearest(collective, bucket);
  if (!other) return std::nullopt;
  return std::pair(*other, found->second.at(collective, *other));
}

void Decisions::add_measured(TuningClass group,
                             Collective collective,
                             int bucket,
                             const Entry& times) {
  std::lock_guard lock(mutex_);
  measured_[group].at(collective, bucket) = times;
}

void Decisions::ignore(Profile& profile, const std::string& path, const Error& error) {
  profile.usable = false;
  log(LogLevel::kWarning,
      "the profile " + path + " is ignored: " + error.what() +
          ". Remove it, or name another file with the option profile (DEEPYTORCH_PROFILE)");
}

Decisions::Profile& Decisions::profile_at(const std::string& path) {
  const auto found = profiles_.find(path);
  if (found != profiles_.end()) return found->second;
  Profile& profile = profiles_[path];
  try {
    profile.text = read_profile(path);
  } catch (const Error& error) {
    if (error.status() == DPT_ERR_INVALID) {
      ignore(profile, path, error);
    } else {
      log(LogLevel::kDebug, std::string("no profile: ") + error.what());
    }
  }
  return profile;
}

Entry Decisions::in_profile(const std::string& path,
                            TuningClass group,
                            Collective collective,
                            int bucket) {
  if (path.empty()) return {};
  std::lock_guard lock(mutex_);
  Profile& profile = profile_at(path);
  if (!profile.usable) return {};
  auto found = profile.tables.find(group);
  if (found == profile.tables.end()) {
    try {
      const auto table = find_in_profile(profile.text, key_of(group));
      found = profile.tables.emplace(group, table.value_or(TimingTable{})).first;
    } catch (const Error& error) {
      ignore(profile, path, error);
      return {};
    }
  }
  return found->second.at(collective, bucket);
}

void Decisions::save(const std::string& path, TuningClass group) {
  if (path.empty()) return;
  std::lock_guard lock(mutex_);
  Profile& profile = profile_at(path);
  if (!profile.usable || !profile.writable) return;
  try {
    // Read again: other processes may have written since.
    write_profile(path, merge_into_profile(read_profile(path), key_of(group), measured_[group]));
  } catch (const Error& error) {
    profile.writable = false;
    log(LogLevel::kDebug, "the profile " + path + " is not saved: " + error.what());
  }
}

double Decisions::spent_us() const {
  std::lock_guard lock(mutex_);
  return spent_us_;
}

void Decisions::add_spent_us(double time_us) {
  std::lock_guard lock(mutex_);
  spent_us_ += time_us;
}

double Decisions::budget_us() const {
  std::lock_guard lock(mutex_);
  return budget_us_;
}

void Decisions::set_budget_us(double time_us) {
  std::lock_guard lock(mutex_);
  budget_us_ = time_us;
}

void Decisions::add(const DecisionRow& row) {
  std::lock_guard lock(mutex_);
  rows_.insert_or_assign({row.group, row.collective, row.bytes.nominal}, row);
}

std::vector<DecisionRow> Decisions::rows() const {
  std::lock_guard lock(mutex_);
  std::vector<DecisionRow> all;
  for (const auto& [key, row] : rows_) all.push_back(row);
  return all;
}

void Decisions::reset() {
  std::lock_guard lock(mutex_);
  measured_.clear();
  profiles_.clear();
  rows_.clear();
  spent_us_ = 0;
}

}  // namespace dpt
