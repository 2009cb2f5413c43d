// Device memory that other processes can map: CUDA's virtual memory management, passed as a file
// descriptor. Peers keep it when its owner dies, and it needs no allocator of torch's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/shm/fd_exchange.hpp"

namespace dpt::cuda {

// Mapped for one device of this process, read and write.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Zeroed memory on `device`, `bytes` rounded up. Throws Error(DPT_ERR_SYSTEM), as all here.
  static DeviceMemory allocate(int device, size_t bytes);
  // Takes memory that another process exported, for the kernels of `device`. The descriptor is not
  // needed afterwards.
  static DeviceMemory import(int device, const UniqueFd& file, size_t bytes);

  // How often this process did that.
  static int imported();

  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();

  UniqueFd export_file() const;
  char* address() const { return reinterpret_cast<char*>(address_); }
  size_t bytes() const { return bytes_; }

 private:
  DeviceMemory(int device, uint64_t handle, size_t bytes);
  void free() noexcept;

  int device_ = -1;
  uint64_t handle_ = 0;
  uint64_t address_ = 0;
  size_t bytes_ = 0;
};

}  // namespace dpt::cuda
