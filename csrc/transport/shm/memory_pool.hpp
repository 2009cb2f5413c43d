// Host memory that local peers can reach without a copy ("registered"): a caching allocator over
// one memfd per process, which peers map when they join a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace dpt {

// Thread safety: all functions from any thread.
class MemoryPool {
 public:
  // At least `bytes`, aligned to 256 bytes. Throws Error(DPT_ERR_SYSTEM) when the machine has no
  // more.
  void* allocate(size_t bytes);
  void free(void* address);
  // Where [address, address + bytes) lies in the pool's file; nothing when it lies elsewhere.
  std::optional<uint64_t> offset_of(const void* address, size_t bytes) const;
};

}  // namespace dpt
