// Stands in for CUDA's virtual memory management: memory files, mapped into reserved ranges.
// Several of these in one test process are as many processes on one machine.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/shm/chunk_memory.hpp"

namespace dpt::testing {

// The devices' memory: gone when nobody has a handle or a mapping of it.
class FakeChunkDevices {
 public:
  explicit FakeChunkDevices(size_t bytes = SIZE_MAX) : bytes_(bytes) {}
  // False: there is no more.
  bool add(ino_t file, size_t bytes);
  void hold(ino_t file, size_t bytes);
  void let_go(ino_t file);
  size_t used() const;

 private:
  struct Memory {
    size_t bytes;
    int holders;
  };
  const size_t bytes_;
  mutable std::mutex mutex_;
  std::map<ino_t, Memory> files_;
  size_t used_ = 0;
};

class FakeChunkMemory final : public ChunkMemory {
 public:
  explicit FakeChunkMemory(std::shared_ptr<FakeChunkDevices> devices)
      : devices_(std::move(devices)) {}

  // Calls that this process's driver can't make from now on.
  std::atomic<bool> cant_reserve{false};
  std::atomic<bool> cant_import{false};
  std::atomic<bool> cant_export{false};
  // Imports wait until this ends, as in a process that is stopped.
  void stop(bool stopped);
  std::atomic<int> synchronized{0};
  // The devices of whatever is mapped there.
  std::vector<int> devices_at(const char* address) const;

  char* reserve(size_t bytes) override;
  void unreserve(char* address, size_t bytes) noexcept override;
  uint64_t create(int device, size_t bytes) override;
  UniqueFd export_file(uint64_t handle) override;
  uint64_t import_file(int device, const UniqueFd& file) override;
  void release(uint64_t handle) noexcept override;
  void map(char* address, size_t bytes, uint64_t handle, const std::vector<int>& devices) override;
  void allow(char* address, size_t bytes, const std::vector<int>& devices) override;
  void unmap(char* address, size_t bytes) noexcept override;
  void synchronize(int device) noexcept override;

 private:
  struct Mapping {
    size_t bytes;
    ino_t file;
    std::vector<int> devices;
  };
  uint64_t keep(UniqueFd file);

  const std::shared_ptr<FakeChunkDevices> devices_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  uint64_t next_handle_ = 1;
  std::map<uint64_t, UniqueFd> handles_;
  std::map<const char*, Mapping> mappings_;
  std::map<const char*, size_t> ranges_;
};

}  // namespace dpt::testing
