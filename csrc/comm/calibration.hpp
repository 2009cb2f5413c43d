// A group's side of the tuner: which plan serves which size, and how the ranks find out together.
//
// At the first operation of a (collective, range of sizes) all ranks are in the same operation in
// the same order. There they settle that range for the group's lifetime. Rank 0 knows times (of
// this process, or the profile's), or the ranks measure now, or the rule of thumb stays. Whatever
// they go by is published by rank 0 through the segment or measured by all of them together, so
// they decide alike.
//
// Thread safety: `find` and `is_open` from any thread; `agree` and `settle` belong to the one
// thread that runs the group's current operation.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "comm/decisions.hpp"

namespace dpt {

// How the ranks of a group time a range of sizes: see HostBench, DeviceBench.
class Bench {
 public:
  virtual ~Bench() = default;
  // This rank can measure nothing in this operation; the range stays open.
  virtual bool is_busy() const { return false; }
  // The range that is measured for `bucket`, equal on all ranks: a smaller one where large messages
  // go by what was measured with smaller ones.
  virtual int tried_for(int bucket) const { return bucket; }
  struct Result {
    int bucket;       // that was measured: a smaller one where there is little memory
    Entry times;      // the same on every rank; empty: nothing could be measured
    double spent_us;  // counted against the budget
  };
  // Called by all ranks, after an `enter`, with what `tried_for` says.
  virtual Result measure(const RunContext& context, int bucket) = 0;
};

class GroupTuning {
 public:
  GroupTuning(const dpt_comm_options& options, const dpt_delegate& delegate);

  // The ranks have met: rank 0's option `tune` counts for all, and the delegate is a candidate
  // where all have one to try. Until then nothing is open. Called by every rank.
  void agree(Segment& segment, Nodes* nodes, bool oversubscribed, const WaitContext& wait);
  // The same for operations on the ranks' GPUs. `device`: see TuningClass; `delegate`: it serves
  // them.
  void agree_on_device(const RunContext& context, std::string_view device, bool delegate);
  // Whether native code is used only where it is known to be no slower.
  bool delegate_competes() const { return delegate_competes_; }
  const TuningClass& group() const { return group_; }
  // Everything is measured anew, on all ranks.
  bool is_forced() const { return tune_ == DPT_TUNE_FORCE; }

  // Whether `settle` is to be called before the next operation of this size. Tens of nanoseconds,
  // as `find`.
  bool is_open(Collective collective, size_t bytes) const;
  // The settled plan; nullptr: none, so the rule of thumb.
  const Decision* find(Collective collective, size_t bytes) const;

  // Settles the range that holds `bytes`, for the operation that all ranks are about to run. May
  // measure, for some tenths of a second. Throws what an operation throws, also for ranks that are
  // in different ones.
  void settle(const RunContext& context, size_t bytes, Bench& bench);
  // With the delegate, if it competes, else nullptr.
  const dpt_delegate* rival() const { return delegate_competes_ ? &delegate_ : nullptr; }

 private:
  struct Proposal;
  // A rank brings these to `agree`.
  struct Terms {
    dpt_tune tune;
    bool measures;
    bool delegate;
    bool oversubscribed;
  };
  void agree_on(const RunContext& context, const Terms& mine);
  Limits limits(const Segment& segment) const;
  Proposal propose(const Operation& operation, int bucket, const Segment& segment) const;
  // Whether all ranks are here to measure; NOTE [Rendezvous].
  bool all_come(const RunContext& context, int bucket);
  void freeze(Collective collective, int bucket, Decision decision);

  dpt_tune tune_;
  std::string profile_;
  dpt_delegate delegate_;
  bool measures_ = false;  // false: every size goes by the rule of thumb
  TuningClass group_{1, false};
  bool delegate_competes_ = false;
  int times_busy_ = 0;
  bool ranks_came_apart_ = false;
  std::array<std::array<uint32_t, kNumBuckets>, kNumCollectives> visits_{};
  std::vector<std::unique_ptr<const Decision>> decisions_;
  std::array<std::array<std::atomic<const Decision*>, kNumBuckets>, kNumCollectives> settled_{};
};

}  // namespace dpt
