// One rank's membership of a staged group: the memory that its ranks share, its lanes and workers.
// The same serves devices that reach each other's memory. Data that is copied up then goes to a
// slot on the device. Peers fetch it from there, and no multiprocessor is taken.
//
// Lifecycle: `connect` is called by all ranks together. The ranks of a node share a memfd that is
// passed over an abstract socket, so nothing of this memory is visible anywhere. With the last
// rank's Group it is let go, and its pages are unlocked. A child process made by fork does not get
// it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/wait.hpp"
#include "staged/internode/internode_sender.hpp"
#include "staged/pipeline.hpp"
#include "staged/workers.hpp"

namespace dpt::staged {

class Group {
 public:
  struct Setup {
    Membership ranks;
    const std::vector<int64_t>& global_ranks;
    size_t staging_bytes;   // most memory for this group
    int threads;            // of this process; the fewest of all ranks count
    std::vector<int> cpus;  // near the rank's device; empty: unknown
    bool oversubscribed;    // the ranks' threads outnumber the cores
    // Every rank's text, in rank order. Of at most kMostWords bytes.
    std::function<std::vector<std::string>(const std::string&)> all_gather;
    const WaitContext& wait;
    std::function<std::unique_ptr<CopyEngine>()> make_engine;  // may throw Error(DPT_ERR_SYSTEM)
    // Every rank's slots as this process sees them, kDepth of `slot_bytes` each, on devices; empty:
    // in the host's memory.
    std::vector<char*> slots = {};
    size_t slot_bytes = 0;
    // The way to other nodes, of as many ranks each; nullptr: there are none.
    std::shared_ptr<Between> between = nullptr;
    // This rank's own workers, for tests; nullptr: those of the process.
    std::shared_ptr<Workers> workers = nullptr;
  };
  static constexpr size_t kMostWords = 240;
  static constexpr int kMostRanks = 16;  // of a node
  static constexpr int kDepth = 3;

  // Throws Error(DPT_ERR_SYSTEM), on every rank alike, where any of them can't take part.
  static std::unique_ptr<Group> connect(const Setup& setup);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const Shape& shape() const { return shape_; }
  size_t memory_bytes() const { return Board::bytes(shape_); }
  // See Pipeline::enqueue.
  void start(const dpt_request& request,
             const Cut& cut,
             Stream stream,
             const StartHooks& hooks = {});

  std::optional<Pipeline::Failure> failure() const { return pipeline_->failure(); }
  void abort();
  // The same, if anything is under way.
  void stop_waiting();
  void release() { pipeline_->release(); }

 private:
  class Memory;

  Group(const Setup& setup, const Shape& shape);

  Membership ranks_;
  Shape shape_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<CopyEngine> engine_;
  std::shared_ptr<Workers> workers_;
  std::unique_ptr<Pipeline> pipeline_;
};

}  // namespace dpt::staged
