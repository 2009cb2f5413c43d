#include "fake_chunk_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>

#include "base/error.hpp"

namespace dpt::testing {
namespace {

ino_t file_of(const UniqueFd& file) {
  struct stat info{};
  DPT_SYS_CHECK(fstat(file.get(), &info));
  return info.st_ino;
}

size_t bytes_of(const UniqueFd& file) {
  struct stat info{};
  DPT_SYS_CHECK(fstat(file.get(), &info));
  return static_cast<size_t>(info.st_size);
}

UniqueFd duplicate(const UniqueFd& file) {
  return UniqueFd(DPT_SYS_CHECK(fcntl(file.get(), F_DUPFD_CLOEXEC, 0)));
}

// Crashes where a driver would.
void require(bool holds) {
  if (!holds) std::abort();
}

char* nothing_at(char* address, size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const made =
      mmap(address, bytes, PROT_NONE, flags | (address != nullptr ? MAP_FIXED : 0), -1, 0);
  if (made == MAP_FAILED) throw_system_error("mmap");
  return static_cast<char*>(made);
}

}  // namespace

bool FakeChunkDevices::add(ino_t file, size_t bytes) {
  std::lock_guard lock(mutex_);
  if (bytes > bytes_ - used_) return false;
  used_ += bytes;
  files_[file] = {bytes, 1};
  return true;
}

void FakeChunkDevices::hold(ino_t file, size_t bytes) {
  std::lock_guard lock(mutex_);
  // Its owner may have freed it while a descriptor was on its way, which keeps it.
  const auto [found, again] = files_.try_emplace(file, Memory{bytes, 0});
  if (again) used_ += bytes;
  ++found->second.holders;
}

void FakeChunkDevices::let_go(ino_t file) {
  std::lock_guard lock(mutex_);
  const auto found = files_.find(file);
  if (--found->second.holders > 0) return;
  used_ -= found->second.bytes;
  files_.erase(found);
}

size_t FakeChunkDevices::used() const {
  std::lock_guard lock(mutex_);
  return used_;
}

void FakeChunkMemory::stop(bool stopped) {
  {
    std::lock_guard lock(mutex_);
    stopped_ = stopped;
  }
  changed_.notify_all();
}

std::vector<int> FakeChunkMemory::devices_at(const char* address) const {
  std::lock_guard lock(mutex_);
  const auto found = mappings_.find(address);
  return found == mappings_.end() ? std::vector<int>() : found->second.devices;
}

char* FakeChunkMemory::reserve(size_t bytes) {
  if (cant_reserve) throw Error(DPT_ERR_SYSTEM, "this fake driver reserves nothing");
  char* const range = nothing_at(nullptr, bytes);
  std::lock_guard lock(mutex_);
  ranges_[range] = bytes;
  return range;
}

void FakeChunkMemory::unreserve(char* address, size_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  require(ranges_.at(address) == bytes);
  const auto inside = mappings_.lower_bound(address);
  require(inside == mappings_.end() || inside->first >= address + bytes);
  ranges_.erase(address);
  munmap(address, bytes);
}

uint64_t FakeChunkMemory::keep(UniqueFd file) {
  std::lock_guard lock(mutex_);
  handles_[next_handle_] = std::move(file);
  return next_handle_++;
}

uint64_t FakeChunkMemory::create(int, size_t bytes) {
  UniqueFd file(
      DPT_SYS_CHECK(static_cast<int>(syscall(SYS_memfd_create, "chunk", 1u /* MFD_CLOEXEC */))));
  DPT_SYS_CHECK(ftruncate(file.get(), static_cast<off_t>(bytes)));
  if (!devices_->add(file_of(file), bytes)) return 0;
  return keep(std::move(file));
}

UniqueFd FakeChunkMemory::export_file(uint64_t handle) {
  if (cant_export) throw Error(DPT_ERR_SYSTEM, "this fake driver exports nothing");
  std::lock_guard lock(mutex_);
  return duplicate(handles_.at(handle));
}

uint64_t FakeChunkMemory::import_file(int, const UniqueFd& file) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !stopped_; });
  }
  if (cant_import) throw Error(DPT_ERR_SYSTEM, "this fake driver imports nothing");
  devices_->hold(file_of(file), bytes_of(file));
  return keep(duplicate(file));
}

void FakeChunkMemory::release(uint64_t handle) noexcept {
  std::lock_guard lock(mutex_);
  devices_->let_go(file_of(handles_.at(handle)));
  handles_.erase(handle);
}

void FakeChunkMemory::map(char* address,
                          size_t bytes,
                          uint64_t handle,
                          const std::vector<int>& devices) {
  std::lock_guard lock(mutex_);
  const UniqueFd& file = handles_.at(handle);
  // Nothing is there yet, and it is within a range.
  const auto after = mappings_.lower_bound(address);
  require(after == mappings_.end() || after->first >= address + bytes);
  require(after == mappings_.begin() ||
          std::prev(after)->first + std::prev(after)->second.bytes <= address);
  const auto range = std::prev(ranges_.upper_bound(address));
  require(address + bytes <= range->first + range->second);
  const int flags = MAP_SHARED | MAP_FIXED;
  if (mmap(address, bytes, PROT_READ | PROT_WRITE, flags, file.get(), 0) == MAP_FAILED) {
    throw_system_error("mmap");
  }
  devices_->hold(file_of(file), bytes);
  mappings_[address] = {bytes, file_of(file), devices};
}

void FakeChunkMemory::allow(char* address, size_t bytes, const std::vector<int>& devices) {
  std::lock_guard lock(mutex_);
  Mapping& mapping = mappings_.at(address);
  require(mapping.bytes == bytes);
  mapping.devices = devices;
}

void FakeChunkMemory::unmap(char* address, size_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  const auto found = mappings_.find(address);
  require(found != mappings_.end() && found->second.bytes == bytes);
  devices_->let_go(found->second.file);
  mappings_.erase(found);
  nothing_at(address, bytes);
}

void FakeChunkMemory::synchronize(int) noexcept { ++synchronized; }

}  // namespace dpt::testing
