// The registered device memory of one process and of its peers. It consists of the process's pools,
// one per device, and the links to the processes that it shares a group with.
//
// NOTE [Links] There is one link per pair of processes. The first group that both are in makes it,
// and it is kept until one of them has left all of its groups. So a link that ends is a process
// that died or left: then the others share what they have without it. Whether a pair has a link is
// said by both sides at every `join`, and made anew unless both have it. Two groups that meet at
// the same time may make two; a chunk may then be offered twice, and is mapped once.
//
// NOTE [Thread] While there are links a thread of its own sends, receives and maps, asleep while
// there is nothing to do.
// The driver may keep who maps waiting until kernels have ended, and it is the watchdog that ends
// those which wait for a dead rank.
//
// Thread safety: all functions from any thread, except after_fork.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/wait.hpp"
#include "base/waker.hpp"
#include "transport/shm/chunk_pool.hpp"
#include "transport/shm/peer_chunks.hpp"
#include "transport/shm/pool_link.hpp"

namespace dpt {

class PoolLinks {
 public:
  explicit PoolLinks(std::unique_ptr<ChunkMemory> memory);
  // The process's own lives as long as the process.
  ~PoolLinks();
  PoolLinks(const PoolLinks&) = delete;
  PoolLinks& operator=(const PoolLinks&) = delete;

  // This process's pool on a device; `shape` counts at the first call for it.
  ChunkPool& pool(const ChunkPool::Shape& shape);

  // The ranks of a group on one node, which all call `join` at the same time.
  struct Meeting {
    int rank;
    int size;
    std::function<ChunkPool&()> pool;  // of the device that this rank uses in the group
    // Every rank's text, in rank order. Of at most kMostWords bytes.
    std::function<std::vector<std::string>(const std::string&)> all_gather;
    const WaitContext& wait;
  };
  static constexpr size_t kMostWords = 200;
  struct Joined {
    // By rank, where its pool lies here. Empty: there is no registered memory in this group, on all
    // ranks alike; then why_not says why.
    std::vector<char*> bases;
    std::vector<std::shared_ptr<PeerRange>> ranges;  // to be kept as long as the bases are used
    std::string why_not;
    std::shared_ptr<const void> use;  // likewise; with the last one thread and links end
  };
  // Throws what all_gather and the wait do.
  Joined join(const Meeting& meeting);

  // Links that live.
  size_t size() const;

  // In a forked child: closes the descriptors. The thread does not exist there.
  void after_fork();

 private:
  using Links = std::vector<std::shared_ptr<PoolLink>>;
  struct Member;
  struct Plan;

  std::shared_ptr<const void> use();
  std::shared_ptr<PoolLink> find(const std::string& process) const;
  void open_ranges(const Plan& plan);
  ChunkPool& own_pool(int device) const;
  Links connect(const Meeting& meeting, const Plan& plan, const KeyedSocket& listener);
  void add(Links made);
  void subscribe(const Plan& plan);
  void wake();
  void start();
  void rest();
  void run();
  // False: it has more to send.
  bool drive(PoolLink& link);
  void handle(PoolLink& link, const ChunkMessage& message, const UniqueFd& file);
  void drop(const std::shared_ptr<PoolLink>& link);

  const std::unique_ptr<ChunkMemory> memory_;
  const std::string process_;
  PeerRanges ranges_;
  std::mutex uses_mutex_;
  int uses_ = 0;
  std::atomic<bool> forked_{false};
  mutable std::mutex mutex_;  // guards what follows
  std::map<int, std::unique_ptr<ChunkPool>> pools_;
  Links links_;
  bool stop_ = false;
  Waker waker_;
  std::thread thread_;
};

}  // namespace dpt
