#include "transport/shm/memory_pool.hpp"

#include <cstdlib>

namespace dpt {

void* MemoryPool::allocate(size_t bytes) {
  return std::aligned_alloc(256, (bytes + 255) / 256 * 256);
}
void MemoryPool::free(void* address) { std::free(address); }
std::optional<uint64_t> MemoryPool::offset_of(const void*, size_t) const { return std::nullopt; }

}  // namespace dpt
