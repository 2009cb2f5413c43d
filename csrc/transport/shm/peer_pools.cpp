#include "transport/shm/peer_pools.hpp"

#include <sys/mman.h>

#include <algorithm>

#include "base/error.hpp"

namespace dpt {

MappedPool::MappedPool(const UniqueFd& file) {
  struct stat info{};
  DPT_SYS_CHECK(fstat(file.get(), &info));
  bytes_ = static_cast<size_t>(info.st_size);
  void* memory =
      mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file.get(), 0);
  if (memory == MAP_FAILED) {
    throw_system_error("mmap of " + std::to_string(bytes_ >> 20) +
                       " MiB of address space for a peer's registered memory");
  }
  madvise(memory, bytes_, MADV_HUGEPAGE);
  madvise(memory, bytes_, MADV_DONTFORK);
  // It is in the core dump of its owner.
  madvise(memory, bytes_, MADV_DONTDUMP);
  base_ = static_cast<char*>(memory);
}

MappedPool::~MappedPool() { munmap(base_, bytes_); }

std::shared_ptr<const MappedPool> PeerPools::map(const UniqueFd& file) {
  struct stat info{};
  DPT_SYS_CHECK(fstat(file.get(), &info));
  const auto key = std::pair(info.st_dev, info.st_ino);
  std::lock_guard lock(mutex_);
  // Files that no group shares any more have only their numbers left here; drop those too.
  std::erase_if(mapped_, [](const auto& entry) { return entry.second.expired(); });
  if (const auto found = mapped_.find(key); found != mapped_.end()) {
    if (auto pool = found->second.lock()) return pool;
  }
  auto pool = std::make_shared<const MappedPool>(file);
  mapped_[key] = pool;
  return pool;
}

size_t PeerPools::size() const {
  std::lock_guard lock(mutex_);
  return static_cast<size_t>(std::count_if(
      mapped_.begin(), mapped_.end(), [](const auto& entry) { return !entry.second.expired(); }));
}

}  // namespace dpt
