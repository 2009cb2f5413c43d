#include "comm/statistics.hpp"

#include "base/error.hpp"

namespace dpt {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<GroupStatistics>> groups;
};

// Never destroyed: groups may outlive static destructors.
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

}  // namespace

StatisticsRow* GroupStatistics::row_of(Collective collective,
                                       AlgorithmName algorithm,
                                       const char* reason) {
  std::lock_guard lock(mutex_);
  for (StatisticsRow& row : rows_) {
    if (row.collective == collective && row.algorithm == algorithm && row.reason == reason) {
      return &row;
    }
  }
  return &rows_.emplace_back(StatisticsRow{group_, collective, algorithm, reason});
}

[[gnu::hot]] void GroupStatistics::add(StatisticsRow* row, size_t bytes, double time_us) {
  std::lock_guard lock(mutex_);
  row->calls += 1;
  row->bytes += bytes;
  row->time_us += time_us;
}

std::vector<StatisticsRow> GroupStatistics::rows() const {
  std::lock_guard lock(mutex_);
  std::vector<StatisticsRow> used;
  for (const StatisticsRow& row : rows_) {
    if (row.calls > 0) used.push_back(row);
  }
  return used;
}

void GroupStatistics::reset() {
  std::lock_guard lock(mutex_);
  for (StatisticsRow& row : rows_) row.calls = row.bytes = 0, row.time_us = 0;
  if (arrivals_) arrivals_->reset();
}

Arrivals* GroupStatistics::start_arrivals(const std::vector<int64_t>& global_ranks) {
  std::lock_guard lock(mutex_);
  arrivals_ = std::make_shared<Arrivals>(global_ranks);
  return arrivals_.get();
}

std::shared_ptr<const Arrivals> GroupStatistics::arrivals() const {
  std::lock_guard lock(mutex_);
  return arrivals_;
}

void GroupStatistics::start_nodes(const NodeLayout& layout, int sockets) {
  std::lock_guard lock(mutex_);
  node_group_ = NodeGroup{group_, layout, sockets};
}

void GroupStatistics::note_between_nodes(const NodeRun& run) {
  std::lock_guard lock(mutex_);
  DPT_CHECK(node_group_.has_value());
  std::vector<NodeRun>& last = node_group_->last;
  std::erase_if(last, [&](const NodeRun& old) { return old.collective == run.collective; });
  last.push_back(run);
}

std::optional<NodeGroup> GroupStatistics::node_group() const {
  std::lock_guard lock(mutex_);
  return node_group_;
}

std::shared_ptr<GroupStatistics> make_group_statistics(const std::string& group) {
  std::lock_guard lock(registry().mutex);
  // A group made again counts on, so that a program that does so for ever keeps no more for it.
  for (const auto& old : registry().groups) {
    if (old.use_count() == 1 && old->group() == group) return old;
  }
  auto statistics = std::make_shared<GroupStatistics>(group);
  // A destroyed group's rows stay for the report; one that did nothing leaves nothing.
  std::erase_if(registry().groups,
                [](const auto& old) { return old.use_count() == 1 && old->rows().empty(); });
  registry().groups.push_back(statistics);
  return statistics;
}

std::vector<StatisticsRow> all_statistics() {
  std::lock_guard lock(registry().mutex);
  std::vector<StatisticsRow> all;
  for (const auto& group : registry().groups) {
    for (StatisticsRow& row : group->rows()) all.push_back(std::move(row));
  }
  return all;
}

std::vector<GroupArrivals> all_arrivals() {
  std::lock_guard lock(registry().mutex);
  std::vector<GroupArrivals> all;
  for (const auto& group : registry().groups) {
    const auto arrivals = group->arrivals();
    if (arrivals) all.push_back({group->group(), arrivals->sums()});
  }
  return all;
}

std::vector<NodeGroup> all_node_groups() {
  std::lock_guard lock(registry().mutex);
  std::vector<NodeGroup> all;
  for (const auto& group : registry().groups) {
    if (auto found = group->node_group()) all.push_back(std::move(*found));
  }
  return all;
}

void reset_statistics() {
  std::lock_guard lock(registry().mutex);
  for (const auto& group : registry().groups) group->reset();
}

}  // namespace dpt
