// The memory one group shares on a node, and the signals in it.
//
// Lifecycle: rank 0 creates the memfd, every rank maps it (child processes made by fork do not get
// the mapping), the last unmap frees it. Thread safety: `barrier` and the staging buffers belong to
// the one thread that runs the group's current operation; abort() and leave() may come from any.
//
// NOTE [Staging parity] Every staging buffer exists twice. Successive pipeline steps use
// alternating copies, also across operations: `next_step` counts steps of the group's whole life.
// A rank that is one barrier ahead therefore never writes the copy a slow peer still reads, and no
// operation needs a closing barrier.
//
// NOTE [Abort word] Whoever finds the group broken (a dead peer, a timeout, Ctrl-C, abort())
// publishes it once; it stays. Every wait looks at it at least once per slice.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/types.hpp"
#include "base/wait.hpp"
#include "transport/shm/memory_pool.hpp"

namespace dpt {

// A rank describes the operation it enters by this; its peers read it after the operation's first
// barrier.
struct OpHeader {
  uint64_t sequence;
  uint64_t count;
  double premul_factor;
  int32_t collective;
  int32_t dtype;
  int32_t reduce_op;
  int32_t root;
  uint32_t uneven;      // whether its parts differ in size
  uint32_t num_steps;   // of staging that its plain buffers need
  uint32_t lane_bytes;  // how it cuts its slot, see exchange.cpp
  uint32_t registered;  // whether peers reach any of its buffers directly
  int64_t arrived_ns;   // when it came here, on the node's steady clock
};

// One buffer of a rank, for its peers.
struct BufferInfo {
  static constexpr uint64_t kPrivate = ~uint64_t{0};
  uint64_t bytes;
  uint64_t offset;  // in the rank's pool of registered memory; kPrivate: it lies elsewhere
};

// A waiting rank's chances, as far as it knows them.
enum class WaitStyle {
  kOwnCore,     // every rank has a core: spin as long as spinning has paid lately, then sleep
  kSharedCore,  // more ranks than cores: a spinner holds the core its peer needs, so hand it over
  kBackground,  // the progress thread: the core belongs to the caller's compute, so sleep soon
};

// How long to spin before sleeping, learnt from the waits so far. Two ranks that landed on one core
// (another process has the other) would spin in vain for the whole limit each time.
class AdaptiveSpin {
 public:
  // Pauses to spend on the next wait.
  int limit();
  void ended_after(int pauses);
  void slept();

 private:
  static constexpr int kMost = 4000;  // about 100 us
  static constexpr int kLeast = 100;
  int limit_ = kMost;
  unsigned waits_ = 0;
};

class Segment {
 public:
  static constexpr size_t kMaxChunkBytes = 1 << 20;
  static constexpr size_t kMinChunkBytes = 16 << 10;
  static constexpr size_t kSmallBytes = 64 << 10;
  // One rank's part of a group's staging memory, when every page of it has been touched.
  static constexpr size_t staging_bytes(int size, size_t max_chunk_bytes) {
    return 2 * (kSmallBytes + max_chunk_bytes + max_chunk_bytes / size);
  }

  // Creates the shared file for `size` ranks; returns its descriptor. Pages cost memory once they
  // are used. Throws Error(DPT_ERR_SYSTEM).
  static int create_file(int size, size_t max_chunk_bytes);

  // Maps `fd` (and closes it). `global_ranks` are for messages.
  Segment(int fd, int rank, const std::vector<int64_t>& global_ranks);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t global_rank(int rank) const { return global_ranks_[rank]; }
  size_t max_chunk_bytes() const { return max_chunk_bytes_; }

  // Waits until every rank called it as often as this one. Throws Error: DPT_ERR_ABORTED (or the
  // abort's own status), DPT_ERR_TIMEOUT naming the missing ranks, DPT_ERR_PEER_LOST,
  // DPT_ERR_INTERRUPTED. After any of these the group is aborted for every rank.
  void barrier(const WaitContext& wait, WaitStyle style);
  // Says that this rank waits for another node, until it is told otherwise. Where only such ranks
  // are missing, they are to say at the time limit who is missing there; `barrier` says so itself
  // only later.
  void set_waits_elsewhere(bool waits);

  OpHeader& header(int rank, int parity);
  BufferInfo* inputs(int rank, int parity) const;   // size() of them
  BufferInfo* outputs(int rank, int parity) const;  // size() of them
  char* small(int rank, int parity) const;          // kSmallBytes
  char* slot(int rank, int parity) const;           // max_chunk_bytes()
  char* result(int parity) const;  // max_chunk_bytes(), written by all ranks in shares
  uint64_t next_step = 0;          // see NOTE [Staging parity]

  // Registered memory: where each rank's pool is mapped here (nullptr: it is not), and this rank's
  // own pool (nullptr: none).
  void set_pools(const MemoryPool* own, std::vector<char*> mapped);
  char* pool(int rank) const { return pools_.empty() ? nullptr : pools_[rank]; }
  // The place in this rank's pool that every peer can reach, or nothing.
  std::optional<uint64_t> offset_of(const void* address, size_t bytes) const;

  // Words for NOTE [Rendezvous], zero at first.
  static constexpr int kNumRendezvous = 64;
  std::atomic<uint32_t>& rendezvous(int place) const;

  // Point to point: the area that transport/shm/mailbox.hpp divides, zero at first.
  char* mailboxes() const;
  // Each rank has a doorbell. `rings` reads this rank's own before it looks for work;
  // `await_ring` then sleeps until it was rung since, or `slice` has passed.
  void ring(int rank);
  uint32_t rings() const;
  void await_ring(uint32_t seen,
                  std::chrono::milliseconds slice,
                  WaitStyle style,
                  AdaptiveSpin& spin);

  // Publishes the first reason and wakes every waiter; later calls change nothing
  // and return false.
  bool abort(dpt_status status, const std::string& reason);
  bool aborted() const;
  void throw_if_aborted() const;
  // This rank uses the group no more; peers that still wait for it get an error.
  void leave();
  bool has_left(int rank) const;

  // Why this rank's stock backend gave up on a device, where others may wait in it for this rank;
  // empty: it works (again). From one thread at a time.
  void note_stock_failure(const std::string& why);
  std::string stock_failure(int rank) const;

  // NOTE [Heartbeat] Each process's watchdog beats for its rank several times a second, whatever
  // the program does meanwhile. Silence tells a stopped or frozen process from one that is busy; it
  // is a hint for messages, never a death: what is stopped may go on. It is measured up to this
  // rank's own beat before its last.
  void beat();
  std::chrono::milliseconds silent_for(int rank) const;

 private:
  struct Shared;
  struct Layout;
  void meet_all(const WaitContext& wait, WaitStyle style);
  [[noreturn]] void fail(dpt_status status, const std::string& reason);
  std::string missing_ranks() const;
  bool missing_wait_elsewhere() const;
  void check_left(const WaitContext& wait);
  char* at(size_t offset) const { return reinterpret_cast<char*>(shared_) + offset; }

  int rank_;
  int size_;
  std::vector<int64_t> global_ranks_;
  Shared* shared_ = nullptr;
  size_t bytes_ = 0;
  size_t max_chunk_bytes_ = 0;
  std::unique_ptr<Layout> layout_;
  AdaptiveSpin spin_;
  const MemoryPool* own_pool_ = nullptr;
  std::vector<char*> pools_;
  std::atomic<int64_t> beaten_before_ms_{0};
};

}  // namespace dpt
