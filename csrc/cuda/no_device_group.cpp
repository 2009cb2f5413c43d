// Stands in for device_group.cpp, device_pool.cpp and device_trials.cpp where the core is built
// without CUDA's compiler.
#include "base/error.hpp"
#include "cuda/device_group.hpp"
#include "cuda/device_pool.hpp"
#include "cuda/device_trials.hpp"

namespace dpt {

std::string DeviceGroup::why_absent() { return "GPU kernels absent: built without nvcc"; }

uint64_t DeviceGroup::capture_of(cuda::Stream) { return 0; }

bool DeviceGroup::has_ended(void*) { return true; }

void DeviceGroup::outside_capture(int, const std::function<void()>& task) { task(); }

void DeviceGroup::after_fork() {}

int DeviceGroup::peer_mappings() { return 0; }
uint64_t DeviceGroup::landing_calls() { return 0; }

std::unique_ptr<DeviceGroup> DeviceGroup::connect(const Setup&) {
  throw Error(DPT_ERR_SYSTEM, why_absent());
}

std::unique_ptr<DeviceTrials> DeviceTrials::on(int, cuda::Stream) {
  throw Error(DPT_ERR_SYSTEM, DeviceGroup::why_absent());
}

namespace cuda {
DevicePool& DevicePool::of(int) { throw Error(DPT_ERR_SYSTEM, DeviceGroup::why_absent()); }
char* DevicePool::allocate(size_t) { return nullptr; }
void DevicePool::free(char*) noexcept {}
bool DevicePool::is_shared(const void*, size_t) const { return false; }
size_t DevicePool::chunk_bytes() const { return 0; }
size_t DevicePool::shared_bytes() const { return 0; }
DeviceModel model_of(int) { throw Error(DPT_ERR_SYSTEM, DeviceGroup::why_absent()); }
std::optional<bool> has_nvlink(int, const std::string&) { return std::nullopt; }
std::optional<bool> has_peer_access(int, const std::string&) { return std::nullopt; }
bool can_reduce_on_device(DataType, ReduceOp) { return false; }
bool has_large_kernels(DataType, ReduceOp) { return false; }
}  // namespace cuda

}  // namespace dpt
