// The one object per process that groups share: who this process is, whom it shares memory with,
// and the watchdog over those peers. Groups are light views that register here.
//
// Lifecycle: made at the first group, never destroyed. After fork() the child's fabric is marked
// dead: it closes every descriptor it inherited, and groups of the parent refuse to work there.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bootstrap/exchange.hpp"
#include "comm/watchdog.hpp"
#include "transport/shm/memory_pool.hpp"
#include "transport/shm/segment.hpp"

namespace dpt {

class Fabric {
 public:
  static Fabric& instance();
  // True in a child of fork() whose parent already had a fabric.
  static bool forked();

  // This process's facts, gathered once.
  const PeerInfo& self() const { return self_; }

  // Memory that local peers can reach without a copy.
  MemoryPool& memory() { return memory_; }

  // The longest chunk this process can stage for one more group of `size` ranks, when all its
  // groups together stay within `staging_bytes` (0: the default): a sixth of what is left, so that
  // the first groups get the most and there is always some for the next.
  size_t offer_chunk_bytes(int size, size_t staging_bytes);

  // From now on the death of any of `peers` (one per rank of `segment`) aborts the segment.
  // Takes ownership of the pidfds (-1: a rank has none). Call detach before the segment goes away.
  void attach(Segment* segment, const std::vector<PeerInfo>& peers, const std::vector<int>& pidfds);
  void detach(Segment* segment);

  // Whether the ranks that share this node outnumber the cores they may use together.
  bool oversubscribed(const std::vector<PeerInfo>& peers) const;

 private:
  Fabric();
  void on_death(const std::string& process);
  // Shows every group's peers that this process lives; false when there is no group.
  bool beat();
  static void after_fork_in_child();

  PeerInfo self_;
  MemoryPool memory_;
  std::mutex mutex_;
  std::map<Segment*, std::vector<PeerInfo>> groups_;
  size_t staging_used_ = 0;
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace dpt
