// Maps a peer process's chunks of device memory here. They go into a range of addresses as long as
// the peer's own, each chunk at its offset there. The range never moves, since kernels and captured
// graphs keep its address.
//
// Thread safety: all functions from any thread.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transport/shm/chunk_memory.hpp"
#include "transport/shm/pool_link.hpp"

namespace dpt {

class PeerRange {
 public:
  // Throws Error(DPT_ERR_SYSTEM), as all here.
  PeerRange(ChunkMemory* memory, size_t bytes);
  ~PeerRange();
  PeerRange(const PeerRange&) = delete;
  PeerRange& operator=(const PeerRange&) = delete;

  char* base() const { return base_; }
  size_t bytes() const { return bytes_; }

  // This device of this process may use what is there, and what will be.
  void allow(int device);
  void map(const ChunkMessage& offer, const UniqueFd& file);
  // Does nothing if the chunk is not mapped.
  void drop(uint64_t id) noexcept;
  size_t mapped_bytes() const;

 private:
  struct Mapped {
    uint64_t offset;
    size_t bytes;
    int links;  // over which it was offered: two groups may meet at the same time
  };

  ChunkMemory* const memory_;
  const size_t bytes_;
  char* const base_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<int> devices_;
  std::map<uint64_t, Mapped> chunks_;  // by id
};

// Those of all peers, each kept while its process lives and as long as a group uses it.
class PeerRanges {
 public:
  explicit PeerRanges(ChunkMemory* memory) : memory_(memory) {}

  // The range for what `process` has on its `device`; made now if it is new.
  std::shared_ptr<PeerRange> open(const std::string& process, int device, size_t bytes);
  // nullptr: there is none.
  std::shared_ptr<PeerRange> find(const std::string& process, int device) const;
  void forget(const std::string& process);

 private:
  ChunkMemory* const memory_;
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, std::shared_ptr<PeerRange>> ranges_;
};

}  // namespace dpt
