#include "transport/shm/memory_pool.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "base/error.hpp"
#include "base/types.hpp"

namespace dpt {
namespace {

constexpr size_t kAlignment = 256;
// Smaller holes are not worth a system call, and would break up large pages.
constexpr size_t kLeastTrim = 1 << 20;

// The most address space for each process and each of its peers: 128 ranks stay within 47 bits.
constexpr size_t kMostCapacity = size_t{256} << 30;

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

size_t machine_memory() {
  return std::min(static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes(), kMostCapacity);
}

std::string in_mib(size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

MemoryPool::~MemoryPool() {
  if (base() != nullptr) munmap(base(), capacity_);
}

void MemoryPool::open_file() {
  if (base() != nullptr) return;
  const size_t capacity = round_up(capacity_ != 0 ? capacity_ : machine_memory(), page_bytes());
  UniqueFd file(DPT_SYS_CHECK(
      static_cast<int>(syscall(SYS_memfd_create, "deepytorch-memory", 1u /* MFD_CLOEXEC */))));
  if (ftruncate(file.get(), static_cast<off_t>(capacity)) != 0) {
    throw_system_error("ftruncate of registered memory to " + in_mib(capacity));
  }
  void* memory =
      mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file.get(), 0);
  if (memory == MAP_FAILED) {
    throw_system_error("mmap of " + in_mib(capacity) +
                       " of address space for registered memory (is it limited, see ulimit -v?)");
  }
  // Advice: where the system allows large pages for shared memory only to those who ask.
  madvise(memory, capacity, MADV_HUGEPAGE);
  file_ = std::move(file);
  capacity_ = capacity;
  add_free(0, capacity);
  base_.store(static_cast<char*>(memory), std::memory_order_release);
}

void* MemoryPool::allocate(size_t bytes) {
  if (forked_.load(std::memory_order_relaxed)) {
    throw Error(DPT_ERR_INVALID,
                "this process was made by fork() and has no registered memory of its own: start it "
                "with the spawn method, or use ordinary memory in it");
  }
  std::lock_guard lock(mutex_);
  open_file();
  const size_t needed =
      bytes > capacity_ ? bytes : round_up(std::max<size_t>(bytes, 1), kAlignment);
  const auto fit = free_by_size_.lower_bound({needed, 0});
  if (fit == free_by_size_.end()) {
    throw Error(DPT_ERR_SYSTEM,
                "registered memory is exhausted: " + std::to_string(bytes) + " bytes asked for, " +
                    in_mib(usage_.in_use_bytes) + " of " + in_mib(capacity_) +
                    " in use. Free tensors made by allocate_tensor, or use ordinary ones");
  }
  const auto [available, offset] = *fit;
  remove_free(free_.find(offset));
  if (available > needed) add_free(offset + needed, available - needed);
  used_.emplace(offset, needed);
  usage_.in_use_bytes += needed;
  usage_.reserved_bytes = std::max<size_t>(usage_.reserved_bytes, offset + needed);
  return base() + offset;
}

void MemoryPool::free(void* address) {
  // Nor is the lock looked at there: a thread that held it may be the parent's.
  if (forked_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(mutex_);
  const auto offset = offset_of(address, 0);
  const auto block = offset ? used_.find(*offset) : used_.end();
  if (block == used_.end()) {
    throw Error(DPT_ERR_INVALID,
                "free of registered memory that is not allocated (or not any more)");
  }
  uint64_t begin = block->first;
  size_t bytes = block->second;
  used_.erase(block);
  usage_.in_use_bytes -= bytes;
  if (close_if_unused()) return;
  const auto after = free_.lower_bound(begin);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == begin) {
      begin = before->first;
      bytes += before->second;
      remove_free(before);
    }
  }
  if (after != free_.end() && begin + bytes == after->first) {
    bytes += after->second;
    remove_free(after);
  }
  add_free(begin, bytes);
}

std::optional<uint64_t> MemoryPool::offset_of(const void* address, size_t bytes) const {
  // As numbers: `address` may point anywhere.
  const auto begin = reinterpret_cast<uintptr_t>(base());
  const auto place = reinterpret_cast<uintptr_t>(address);
  if (begin == 0 || place < begin || place - begin >= capacity_) return std::nullopt;
  const uint64_t offset = place - begin;
  if (bytes > capacity_ - offset) return std::nullopt;
  return offset;
}

MemoryPool::Hold MemoryPool::hold() {
  std::lock_guard lock(mutex_);
  ++holds_;
  was_held_ = true;
  return {this, [this](const void*) { release(); }};
}

void MemoryPool::release() {
  if (forked_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(mutex_);
  --holds_;
  close_if_unused();
}

bool MemoryPool::close_if_unused() {
  if (holds_ > 0 || !was_held_ || !used_.empty() || base() == nullptr) return false;
  munmap(base_.exchange(nullptr), capacity_);
  file_.reset();
  free_.clear();
  free_by_size_.clear();
  usage_ = {0, 0};
  was_held_ = false;
  return true;
}

int MemoryPool::file() {
  std::lock_guard lock(mutex_);
  open_file();
  return file_.get();
}

size_t MemoryPool::trim() {
  if (forked_.load(std::memory_order_relaxed)) return 0;
  std::lock_guard lock(mutex_);
  size_t trimmed = 0;
  for (const auto& [offset, bytes] : free_) {
    // The part beyond the highest block ever used has no pages.
    const uint64_t begin = round_up(offset, page_bytes());
    const uint64_t used_end = round_up(usage_.reserved_bytes, page_bytes());
    const uint64_t end = std::min((offset + bytes) / page_bytes() * page_bytes(), used_end);
    if (end < begin + kLeastTrim) continue;
    DPT_SYS_CHECK(fallocate(file_.get(),
                            FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                            static_cast<off_t>(begin),
                            static_cast<off_t>(end - begin)));
    trimmed += end - begin;
  }
  return trimmed;
}

MemoryPool::Usage MemoryPool::usage() const {
  std::lock_guard lock(mutex_);
  return usage_;
}

void MemoryPool::after_fork() {
  forked_ = true;
  file_.reset();
  // No lock: only the forking thread exists here, and another may have held it.
  if (base() != nullptr && usage_.in_use_bytes == 0) munmap(base_.exchange(nullptr), capacity_);
}

void MemoryPool::add_free(uint64_t offset, size_t bytes) {
  free_.emplace(offset, bytes);
  free_by_size_.emplace(bytes, offset);
}

void MemoryPool::remove_free(std::map<uint64_t, size_t>::iterator block) {
  free_by_size_.erase({block->second, block->first});
  free_.erase(block);
}

}  // namespace dpt
