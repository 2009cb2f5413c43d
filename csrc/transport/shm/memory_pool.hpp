// Host memory that local peers can reach without a copy ("registered"). It is a caching allocator
// over one memfd per process. Peers map the memfd when they join a group (peer_pools.hpp).
//
// NOTE [Sparse file] The file is as long as the machine's memory, and mapped once at that length.
// So it never grows or moves, and a peer maps it once too. That costs nothing but address space: a
// page exists from the first write to it, and neither the file nor the mapping reserves any before.
//
// NOTE [Pages] A freed block keeps its pages for the next one, as every caching allocator does: no
// system call in steady state. `trim` gives them back.
//
// Lifecycle: the file is made at the first need. Once nobody holds it any more it goes with the
// last block. A child of fork() keeps the mapping only if its parent's tensors lie there, and owns
// none of it (after_fork). Thread safety: all functions from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "transport/shm/fd_exchange.hpp"

namespace dpt {

class MemoryPool {
 public:
  struct Usage {
    size_t in_use_bytes;    // handed out now, rounded up to the alignment
    size_t reserved_bytes;  // the most the pool ever spanned: a bound on what it holds of memory
  };

  MemoryPool() = default;
  // `capacity_bytes` in place of the machine's memory.
  explicit MemoryPool(size_t capacity_bytes) : capacity_(capacity_bytes) {}
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // At least `bytes`, aligned to 256 bytes, never nullptr. Throws Error: DPT_ERR_SYSTEM when there
  // is no more, DPT_ERR_INVALID in a child of fork().
  void* allocate(size_t bytes);
  // Does nothing in a child of fork(). Throws Error(DPT_ERR_INVALID) for what allocate did not
  // return or what is free already.
  void free(void* address);
  // The place of [address, address + bytes) in the pool's file; nothing when it lies elsewhere.
  std::optional<uint64_t> offset_of(const void* address, size_t bytes) const;

  // While somebody has one of these file and base stay. The pool must outlive them.
  using Hold = std::shared_ptr<const void>;
  Hold hold();
  // The file, for passing on; the pool keeps it. Throws Error(DPT_ERR_SYSTEM).
  int file();
  // The file's start here; nullptr before the first need.
  char* base() const { return base_.load(std::memory_order_acquire); }

  // Gives the pages of free blocks back to the system; returns how many bytes that covers.
  size_t trim();
  Usage usage() const;

  // In a forked child: closes the file. The mapping stays readable while it holds anything.
  void after_fork();

 private:
  void open_file();
  void release();
  bool close_if_unused();
  void add_free(uint64_t offset, size_t bytes);
  void remove_free(std::map<uint64_t, size_t>::iterator block);

  std::atomic<char*> base_{nullptr};
  size_t capacity_ = 0;  // constant while base_ is set
  std::atomic<bool> forked_{false};

  mutable std::mutex mutex_;  // guards what follows
  UniqueFd file_;
  std::map<uint64_t, size_t> free_;  // offset -> bytes; neighbours are always merged
  std::set<std::pair<size_t, uint64_t>> free_by_size_;
  std::unordered_map<uint64_t, size_t> used_;
  Usage usage_{0, 0};
  int holds_ = 0;
  bool was_held_ = false;
};

}  // namespace dpt
