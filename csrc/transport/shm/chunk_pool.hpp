// This process's registered memory on one device. It consists of chunks, each mapped at an offset
// of one range of addresses. Peer processes map a chunk at the same offset of a range of their own
// (peer_chunks.hpp).
//
// NOTE [Sharing] Nobody waits for a chunk to be shared. It is offered to every link, and is shared
// once each of them has said that it is mapped there. Until then collectives treat it as ordinary
// memory, and for good if one link can't map it. A link that comes later is offered all chunks
// first.
//
// NOTE [Freeing] Memory is gone when the last process has unmapped it, and an offset may be used
// again only then. `free` waits for that a moment, since whoever frees may be short of memory. A
// peer that does not answer in time keeps the offset, and is not waited for again until it does.
//
// Lifecycle: the range is reserved at the first need and stays. Thread safety: all functions from
// any thread, except after_fork.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/shm/chunk_memory.hpp"
#include "transport/shm/pool_link.hpp"

namespace dpt {

// Knows which parts of a range are in use.
class FreeRanges {
 public:
  explicit FreeRanges(size_t bytes) : free_{{0, bytes}} {}
  // The first place where `bytes` fit; false: nowhere.
  bool take(size_t bytes, uint64_t* offset);
  void give_back(uint64_t offset, size_t bytes);

 private:
  std::map<uint64_t, size_t> free_;  // offset -> bytes; neighbours are always merged
};

class ChunkPool {
 public:
  struct Shape {
    int device;
    size_t capacity;     // of the range, a multiple of the granularity
    size_t granularity;  // of chunks
    std::chrono::milliseconds grace{500};
  };
  struct Usage {
    size_t chunk_bytes;   // not freed
    size_t shared_bytes;  // of them
  };

  ChunkPool(ChunkMemory* memory, const Shape& shape);
  ~ChunkPool();
  ChunkPool(const ChunkPool&) = delete;
  ChunkPool& operator=(const ChunkPool&) = delete;

  const Shape& shape() const { return shape_; }
  // Reserves the range unless that is done. Throws Error(DPT_ERR_SYSTEM).
  char* prepare();
  // nullptr before.
  char* base() const { return base_.load(std::memory_order_acquire); }

  // One chunk of at least `bytes`; nullptr: there is no more. Throws Error(DPT_ERR_SYSTEM) where
  // such memory can't be had at all.
  char* allocate(size_t bytes);
  void free(char* address) noexcept;
  // Another device of this process may use all chunks.
  void allow(int device);

  // Whether every link has mapped all of it. Makes no system call.
  bool is_shared(const void* address, size_t bytes) const;
  Usage usage() const;

  // From now on this link gets every chunk, and all that are there at first.
  void subscribe(const std::shared_ptr<PoolLink>& link);
  // It is gone.
  void unsubscribe(const PoolLink* link);
  // Takes an answer that came back over a link.
  void answer(PoolLink* link, const ChunkMessage& message);

  // In a forked child nothing of it is there.
  void after_fork() { forked_ = true; }

 private:
  enum class State { kOffered, kMapped, kRefused };
  struct Chunk {
    uint64_t id;
    size_t bytes;
    uint64_t handle;
    bool freed = false;
    std::map<const PoolLink*, State> links = {};
  };
  using Chunks = std::map<uint64_t, Chunk>;  // by offset

  void offer(Chunks::value_type& chunk, const std::vector<std::shared_ptr<PoolLink>>& links);
  bool is_awaited(uint64_t offset, uint64_t id) const;
  // It is freed and every link has let go of it.
  void retire(Chunks::iterator chunk);
  void publish();

  ChunkMemory* const memory_;
  const Shape shape_;
  std::atomic<char*> base_{nullptr};
  std::atomic<bool> forked_{false};

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable answered_;
  FreeRanges ranges_;
  Chunks chunks_;
  uint64_t next_id_ = 1;
  std::vector<int> devices_;
  std::vector<std::shared_ptr<PoolLink>> links_;

  // Apart, so that nothing that takes long keeps a launch waiting.
  mutable std::mutex shared_mutex_;
  std::vector<std::pair<uint64_t, uint64_t>> shared_;  // [begin, end), neighbours merged
};

}  // namespace dpt
