#include "cuda/device_memory.hpp"

#include <atomic>
#include <utility>

#include "cuda/device_scope.hpp"
#include "cuda/virtual_memory.hpp"

namespace dpt::cuda {
namespace {

std::atomic<int> imports{0};

}  // namespace

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  VirtualMemory::get().error_string(result, &text);
  throw Error(DPT_ERR_SYSTEM, std::string(call) + ": " + (text != nullptr ? text : "failed"));
}

DeviceMemory DeviceMemory::allocate(int device, size_t bytes) {
  const DeviceScope scope(device);
  DPT_CUDA_CHECK(cudaFree(nullptr));  // the device's context, if nothing has made it yet
  const CUmemAllocationProp properties = properties_of(device);
  size_t granularity = 0;
  const VirtualMemory& driver = VirtualMemory::get();
  check(driver.granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  bytes = (bytes + granularity - 1) / granularity * granularity;
  CUmemGenericAllocationHandle handle = 0;
  check(driver.create(&handle, bytes, &properties, 0), "cuMemCreate");
  DeviceMemory memory(device, handle, bytes);
  DPT_CUDA_CHECK(cudaMemset(memory.address(), 0, bytes));
  DPT_CUDA_CHECK(cudaStreamSynchronize(nullptr));
  return memory;
}

DeviceMemory DeviceMemory::import(int device, const UniqueFd& file, size_t bytes) {
  const DeviceScope scope(device);
  CUmemGenericAllocationHandle handle = 0;
  auto* const descriptor = reinterpret_cast<void*>(static_cast<uintptr_t>(file.get()));
  check(VirtualMemory::get().import_handle(&handle, descriptor, kFileHandle),
        "cuMemImportFromShareableHandle");
  ++imports;
  return {device, handle, bytes};
}

DeviceMemory::DeviceMemory(int device, uint64_t handle, size_t bytes)
    : device_(device), handle_(handle), bytes_(bytes) {
  const VirtualMemory& driver = VirtualMemory::get();
  try {
    CUdeviceptr address = 0;
    check(driver.reserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
    const CUresult mapped = driver.map(address, bytes, 0, handle, 0);
    if (mapped != CUDA_SUCCESS) driver.unreserve(address, bytes);
    check(mapped, "cuMemMap");
    address_ = address;
    const CUmemAccessDesc access = access_of(device);
    check(driver.set_access(address, bytes, &access, 1), "cuMemSetAccess");
  } catch (...) {
    free();
    throw;
  }
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  if (this == &other) return *this;
  free();
  device_ = std::exchange(other.device_, -1);
  handle_ = std::exchange(other.handle_, 0);
  address_ = std::exchange(other.address_, 0);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

DeviceMemory::~DeviceMemory() { free(); }

void DeviceMemory::free() noexcept {
  if (handle_ == 0) return;
  const VirtualMemory& driver = VirtualMemory::get();
  if (address_ != 0) {
    driver.unmap(address_, bytes_);
    driver.unreserve(address_, bytes_);
  }
  driver.release(handle_);
  handle_ = 0;
  address_ = 0;
}

int DeviceMemory::imported() { return imports; }

UniqueFd DeviceMemory::export_file() const {
  int file = -1;
  check(VirtualMemory::get().export_handle(&file, handle_, kFileHandle, 0),
        "cuMemExportToShareableHandle");
  return UniqueFd(file);
}

}  // namespace dpt::cuda
