// Counts a group's work: calls, bytes and time per collective, algorithm and reason.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/arrivals.hpp"
#include "algorithms/outline.hpp"
#include "base/algorithm_name.hpp"
#include "base/types.hpp"

namespace dpt {

struct StatisticsRow {
  std::string group;
  Collective collective;
  AlgorithmName algorithm;
  std::string reason;
  uint64_t calls = 0;
  uint64_t bytes = 0;
  double time_us = 0;  // native operations only: from start to end on this rank
};

// Describes a group that spans nodes, and how it last carried out each collective.
struct NodeGroup {
  std::string group;
  NodeLayout layout;
  int sockets;                     // that carry data, between two ranks
  std::vector<NodeRun> last = {};  // those whose parts differ in size are left out
};

class GroupStatistics {
 public:
  explicit GroupStatistics(std::string group) : group_(std::move(group)) {}
  void add(Collective collective,
           AlgorithmName algorithm,
           const char* reason,
           size_t bytes,
           double time_us) {
    add(row_of(collective, algorithm, reason), bytes, time_us);
  }
  // The same in two steps; the row stays where it is.
  StatisticsRow* row_of(Collective collective, AlgorithmName algorithm, const char* reason);
  void add(StatisticsRow* row, size_t bytes, double time_us);
  std::vector<StatisticsRow> rows() const;
  void reset();
  // Its native operations' arrivals, from when the group's ranks have met.
  Arrivals* start_arrivals(const std::vector<int64_t>& global_ranks);
  std::shared_ptr<const Arrivals> arrivals() const;
  // The group's ranks have met and live on several nodes.
  void start_nodes(const NodeLayout& layout, int sockets);
  void note_between_nodes(const NodeRun& run);
  std::optional<NodeGroup> node_group() const;
  const std::string& group() const { return group_; }

 private:
  std::string group_;
  mutable std::mutex mutex_;
  std::deque<StatisticsRow> rows_;  // those without calls don't count
  std::shared_ptr<Arrivals> arrivals_;
  std::optional<NodeGroup> node_group_;
};

struct GroupArrivals {
  std::string group;
  Arrivals::Sums sums;
};
// The arrivals of all groups this process ever made, oldest first.
std::vector<GroupArrivals> all_arrivals();

// Those that span nodes, oldest first.
std::vector<NodeGroup> all_node_groups();

// Rows of all groups this process ever made, oldest group first.
std::vector<StatisticsRow> all_statistics();
void reset_statistics();
std::shared_ptr<GroupStatistics> make_group_statistics(const std::string& group);

}  // namespace dpt
