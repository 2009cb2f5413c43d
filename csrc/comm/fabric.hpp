// The one object per process that groups share. It knows who this process is and which peers share
// memory with it. It has the memory that they reach of each other, and the watchdog over those
// peers. Groups are light views that register here.
//
// Lifecycle: made at the first group, never destroyed; its threads end with the last group that
// needs them. After fork() the child's fabric is marked
// dead: it closes every descriptor it inherited, and groups of the parent refuse to work there.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bootstrap/exchange.hpp"
#include "comm/watchdog.hpp"
#include "transport/shm/memory_pool.hpp"
#include "transport/shm/peer_pools.hpp"
#include "transport/shm/shm_transport.hpp"
#include "transport/tcp/reactor.hpp"

namespace dpt {

class Fabric {
 public:
  static Fabric& instance();
  // True in a child of fork() whose parent already had a fabric.
  static bool forked();

  // This process's facts, gathered once, as the rank that says them in a group.
  PeerInfo self(int64_t global_rank) const;
  // For tests and emulation: from now on global ranks say they are on these nodes, one name each,
  // counted round. Empty: where they really are. At first what DEEPYTORCH_NODE_ID says.
  void emulate_nodes(std::vector<std::string> names);

  // Memory that local peers can reach without a copy.
  MemoryPool& memory() { return memory_; }
  // The same of the peers of all groups.
  PeerPools& peer_pools() { return peer_pools_; }

  // Waits for the sockets of all groups.
  Reactor& reactor() { return reactor_; }

  // Returns the longest chunk that this process can stage for one more group of `size` ranks. All
  // its groups together stay within `staging_bytes` (0: the default). A group gets a sixth of what
  // is left, so the first get the most and there is always some for the next.
  size_t offer_chunk_bytes(int size, size_t staging_bytes);

  // From now on the death of any of `peers` (one per rank of the segment) aborts the segment.
  // Takes the pidfds and the pools. Call detach before the segment goes away.
  void attach(ShmConnection* connection, const std::vector<PeerInfo>& peers);
  void detach(Segment* segment);

  // `tick` runs in the watchdog's thread, several times a second and after each death; nullptr ends
  // that. It may fail the group, and must not use the fabric.
  void on_tick(Segment* segment, std::function<void()> tick);

  // Device memory that the staging of this process's groups takes, and the multiprocessors that
  // their kernels would together.
  size_t device_staging_used() const { return device_staging_used_; }
  int device_channels_used() const { return device_channels_used_; }
  void add_device_use(int64_t staging_bytes, int channels) {
    device_staging_used_ += staging_bytes;
    device_channels_used_ += channels;
  }

  // The cores that the ranks of this node may use together, whether each has its own or all share.
  int cores_together(const std::vector<PeerInfo>& peers) const;

 private:
  Fabric();
  void on_death(const std::string& process);
  // Shows every group's peers that this process lives.
  void beat();
  static void after_fork_in_child();

  struct Group {
    std::vector<PeerInfo> peers;
    std::vector<std::shared_ptr<const MappedPool>> pools;
    MemoryPool::Hold own_pool;
    std::function<void()> tick = {};
  };

  PeerInfo self_;
  std::vector<std::string> emulated_nodes_;
  MemoryPool memory_;
  PeerPools peer_pools_;
  Reactor reactor_;
  mutable std::mutex mutex_;
  std::map<Segment*, Group> groups_;
  size_t staging_used_ = 0;
  std::atomic<size_t> device_staging_used_{0};
  std::atomic<int> device_channels_used_{0};
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace dpt
