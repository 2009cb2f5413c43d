// Stands in for device_group.cpp and device_trials.cpp where the core is built without CUDA's
// compiler.
#include "base/error.hpp"
#include "cuda/device_group.hpp"
#include "cuda/device_trials.hpp"

namespace dpt {

std::string DeviceGroup::why_absent() { return "GPU kernels absent: built without nvcc"; }

uint64_t DeviceGroup::capture_of(cuda::Stream) { return 0; }

void DeviceGroup::outside_capture(const std::function<void()>& task) { task(); }

int DeviceGroup::peer_mappings() { return 0; }

std::unique_ptr<DeviceGroup> DeviceGroup::connect(const Setup&) {
  throw Error(DPT_ERR_SYSTEM, why_absent());
}

std::unique_ptr<DeviceTrials> DeviceTrials::on(int, cuda::Stream) {
  throw Error(DPT_ERR_SYSTEM, DeviceGroup::why_absent());
}

namespace cuda {
DeviceModel model_of(int) { throw Error(DPT_ERR_SYSTEM, DeviceGroup::why_absent()); }
std::optional<bool> has_nvlink(int, const std::string&) { return std::nullopt; }
std::optional<bool> has_peer_access(int, const std::string&) { return std::nullopt; }
bool can_reduce_on_device(DataType, ReduceOp) { return false; }
bool has_large_kernels(DataType, ReduceOp) { return false; }
}  // namespace cuda

}  // namespace dpt
