#include "cuda/device_pool.hpp"

#include <atomic>
#include <map>
#include <mutex>

#include "base/types.hpp"
#include "cuda/device_scope.hpp"
#include "cuda/virtual_memory.hpp"
#include "transport/shm/pool_links.hpp"

namespace dpt::cuda {
namespace {

CUdeviceptr pointer_to(char* address) { return reinterpret_cast<CUdeviceptr>(address); }

// The calls here have nothing to do with graphs that the program captures.
class CudaChunkMemory final : public ChunkMemory {
 public:
  char* reserve(size_t bytes) override {
    const RelaxedCapture relaxed;
    CUdeviceptr address = 0;
    check(driver_.reserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
    return reinterpret_cast<char*>(address);
  }

  void unreserve(char* address, size_t bytes) noexcept override {
    const RelaxedCapture relaxed;
    driver_.unreserve(pointer_to(address), bytes);
  }

  uint64_t create(int device, size_t bytes) override {
    const RelaxedCapture relaxed;
    const CUmemAllocationProp properties = properties_of(device);
    CUmemGenericAllocationHandle handle = 0;
    const CUresult made = driver_.create(&handle, bytes, &properties, 0);
    if (made == CUDA_ERROR_OUT_OF_MEMORY) return 0;
    check(made, "cuMemCreate");
    return handle;
  }

  UniqueFd export_file(uint64_t handle) override {
    const RelaxedCapture relaxed;
    int file = -1;
    check(driver_.export_handle(&file, handle, kFileHandle, 0), "cuMemExportToShareableHandle");
    return UniqueFd(file);
  }

  uint64_t import_file(int device, const UniqueFd& file) override {
    const RelaxedCapture relaxed;
    const DeviceScope scope(device);
    CUmemGenericAllocationHandle handle = 0;
    auto* const descriptor = reinterpret_cast<void*>(static_cast<uintptr_t>(file.get()));
    check(driver_.import_handle(&handle, descriptor, kFileHandle),
          "cuMemImportFromShareableHandle");
    return handle;
  }

  void release(uint64_t handle) noexcept override {
    const RelaxedCapture relaxed;
    driver_.release(handle);
  }

  void map(char* address, size_t bytes, uint64_t handle, const std::vector<int>& devices) override {
    const RelaxedCapture relaxed;
    check(driver_.map(pointer_to(address), bytes, 0, handle, 0), "cuMemMap");
    try {
      allow(address, bytes, devices);
    } catch (...) {
      driver_.unmap(pointer_to(address), bytes);
      throw;
    }
  }

  void allow(char* address, size_t bytes, const std::vector<int>& devices) override {
    const RelaxedCapture relaxed;
    std::vector<CUmemAccessDesc> access;
    for (const int device : devices) access.push_back(access_of(device));
    check(driver_.set_access(pointer_to(address), bytes, access.data(), access.size()),
          "cuMemSetAccess");
  }

  void unmap(char* address, size_t bytes) noexcept override {
    const RelaxedCapture relaxed;
    driver_.unmap(pointer_to(address), bytes);
  }

  void synchronize(int device) noexcept override {
    const RelaxedCapture relaxed;
    try {
      const DeviceScope scope(device);
      cudaDeviceSynchronize();
    } catch (const Error&) {
      // The driver is gone, at the process's end.
    }
    cudaGetLastError();
  }

 private:
  const VirtualMemory& driver_ = VirtualMemory::get();
};

std::atomic<PoolLinks*> the_links{nullptr};

PoolLinks& links() {
  static PoolLinks* const made = [] {
    auto* const links = new PoolLinks(std::make_unique<CudaChunkMemory>());
    the_links = links;
    return links;
  }();
  return *made;
}

// Twice the device's memory: chunks of many sizes leave holes.
ChunkPool::Shape shape_of(int device) {
  const RelaxedCapture relaxed;
  const DeviceScope scope(device);
  DPT_CUDA_CHECK(cudaFree(nullptr));  // the device's context, if nothing has made it yet
  const CUmemAllocationProp properties = properties_of(device);
  size_t granularity = 0;
  check(VirtualMemory::get().granularity(
            &granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  size_t free = 0;
  size_t total = 0;
  DPT_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return {device, round_up(2 * total, granularity), granularity};
}

}  // namespace

DevicePool& DevicePool::of(int device) {
  static std::mutex mutex;
  static auto* const pools = new std::map<int, DevicePool*>;
  std::lock_guard lock(mutex);
  DevicePool*& pool = (*pools)[device];
  if (pool == nullptr) pool = new DevicePool(&links().pool(shape_of(device)));
  return *pool;
}

char* DevicePool::allocate(size_t bytes) { return chunks_->allocate(bytes); }
void DevicePool::free(char* address) noexcept { chunks_->free(address); }
bool DevicePool::is_shared(const void* address, size_t bytes) const {
  return chunks_->is_shared(address, bytes);
}
char* DevicePool::base() const { return chunks_->base(); }
size_t DevicePool::chunk_bytes() const { return chunks_->usage().chunk_bytes; }
size_t DevicePool::shared_bytes() const { return chunks_->usage().shared_bytes; }

DevicePool::Peers DevicePool::join(const Meeting& meeting) {
  PoolLinks::Joined joined =
      links().join({meeting.rank,
                    meeting.size,
                    [&]() -> ChunkPool& { return *of(meeting.device).chunks_; },
                    meeting.all_gather,
                    meeting.wait});
  return {std::move(joined.bases),
          std::move(joined.ranges),
          std::move(joined.why_not),
          std::move(joined.use)};
}

void DevicePool::after_fork() {
  PoolLinks* const links = the_links;
  if (links != nullptr) links->after_fork();
}

}  // namespace dpt::cuda
