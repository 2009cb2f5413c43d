// The operations that a program starts between startCoalescing and endCoalescing. They are one call
// of the program's, with one work.
//
// Thread safety: none, as c10d's calls of one group come in order.
#pragma once

#include <vector>

#include "call.hpp"
#include "group_setup.hpp"
#include "replay.hpp"

namespace dpt::c10d_adapter {

class Coalescing {
 public:
  explicit Coalescing(const GroupSetup& setup) : setup_(setup) {}

  bool is_open() const { return is_open_; }
  void start();
  WorkPtr end();
  // Counts the operation in when a group of calls is open; returns `work`.
  WorkPtr note(WorkPtr work, const Call& call);
  // Starts an operation on a stock backend, which learns of an open group of calls. NCCL needs to
  // know which sends and receives belong together, or each would wait for its peer's.
  WorkPtr start_on(const BackendPtr& delegate, const Replay& replay);

 private:
  const GroupSetup& setup_;
  bool is_open_ = false;
  std::vector<WorkPtr> works_;
  std::vector<at::Tensor> results_;
  std::vector<BackendPtr> delegates_;  // those that were told
};

}  // namespace dpt::c10d_adapter
