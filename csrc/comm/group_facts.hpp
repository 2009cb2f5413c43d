// Facts of a group that hold from its first to its last moment. They say what its program asked
// for, where its work is counted and recorded, and what messages call it.
//
// Locks: none. All of it is constant once made, and the statistics and the flight record guard
// themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/statistics.hpp"
#include "deepytorch.h"

namespace dpt {

constexpr bool is_message(Collective collective) {
  return collective == DPT_SEND || collective == DPT_RECV;
}

struct GroupFacts {
  // Opens the group in the flight record. Throws Error(DPT_ERR_INVALID) for a rank that the group
  // does not have.
  GroupFacts(const dpt_comm_options& options, const dpt_delegate& delegate);

  int size() const { return static_cast<int>(global_ranks.size()); }
  int64_t global_rank() const { return global_ranks[rank]; }
  // "group g on rank 3".
  std::string place() const;
  // "all_reduce of group g on rank 3".
  std::string describe(Collective collective) const;
  // Why the delegate has to serve the request, as far as no other rank needs to be met for that.
  std::string why_never_native(const dpt_request& request) const;
  // Begins the request in the flight record; returns its number there.
  uint64_t record(const dpt_request& request) const;

  std::string name;
  int rank;
  std::vector<int64_t> global_ranks;
  bool native;
  size_t staging_bytes;
  bool raise_errors;
  bool forces_tuning;                                              // whatever is known
  std::function<std::string(const std::string& failure)> explain;  // empty: nobody can
  std::function<bool()> interrupted;                               // may be empty
  dpt_delegate delegate;
  // The short way looks at these.
  std::shared_ptr<GroupStatistics> statistics;
  int record_group;  // its place in the flight record
};

}  // namespace dpt
