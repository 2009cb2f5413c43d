// Memory behind registered device memory, as its bookkeeping (chunk_pool.hpp, peer_chunks.hpp)
// needs it: CUDA's virtual memory management (cuda/device_pool.cpp), and files in tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/unique_fd.hpp"

namespace dpt {

// Thread safety: all functions from any thread. What is not noexcept throws Error(DPT_ERR_SYSTEM).
class ChunkMemory {
 public:
  virtual ~ChunkMemory() = default;

  // A range of addresses with nothing behind it.
  virtual char* reserve(size_t bytes) = 0;
  virtual void unreserve(char* address, size_t bytes) noexcept = 0;

  // Memory of `device`; 0: it has no more.
  virtual uint64_t create(int device, size_t bytes) = 0;
  virtual UniqueFd export_file(uint64_t handle) = 0;
  // Takes memory that another process exported, for `device`.
  virtual uint64_t import_file(int device, const UniqueFd& file) = 0;
  // Mapped memory stays until it is unmapped.
  virtual void release(uint64_t handle) noexcept = 0;

  // Within a reserved range; `devices` may read and write there.
  virtual void map(char* address,
                   size_t bytes,
                   uint64_t handle,
                   const std::vector<int>& devices) = 0;
  // Lets these use mapped memory from now on.
  virtual void allow(char* address, size_t bytes, const std::vector<int>& devices) = 0;
  virtual void unmap(char* address, size_t bytes) noexcept = 0;

  // Everything that was started on `device` has ended, as far as that can be waited for.
  virtual void synchronize(int device) noexcept = 0;
};

}  // namespace dpt
