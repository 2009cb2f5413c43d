#include "registered.hpp"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>

#include <cstring>

#include "convert.hpp"

namespace dpt::c10d_adapter {
namespace {

// The memory is the process's, not the group's: tensors may outlive the group, and the interpreter.
// The core is never unloaded, so its function stays callable.
class RegisteredAllocator : public c10::Allocator {
 public:
  static RegisteredAllocator& of(const dpt_api* api) {
    static auto* const allocator = new RegisteredAllocator(api);
    return *allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    dpt_error error{};
    const dpt_status status = api_->memory_allocate(bytes, &memory, &error);
    if (status != DPT_OK) std::rethrow_exception(make_exception(status, error.message));
    return {memory, memory, free_, at::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return free_; }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }

 private:
  explicit RegisteredAllocator(const dpt_api* api) : api_(api), free_(api->memory_free) {}

  const dpt_api* api_;
  c10::DeleterFnPtr free_;
};

}  // namespace

bool RegisteredMemory::is_on_device(c10::DeviceIndex index) const {
  if (!at::hasCUDA()) return false;
  if (has_device_memory()) return true;
  try {
    return delegates_.of(at::kCUDA)->supportsTensorAlloc(index);
  } catch (const std::exception&) {
    return false;  // it can't be had; the group's first operation on such a tensor says why
  }
}

bool RegisteredMemory::has_device_memory() const {
  return is_on_host() && setup_.device_memory.is_there && setup_.device_memory.is_there();
}

at::Tensor RegisteredMemory::allocate(int64_t size, const at::TensorOptions& options) const {
  const at::Device device = options.device();
  DPT_CHECK_VALUE(size >= 0, {"allocate_tensor: size ", std::to_string(size), " is negative"});
  if (device.is_cuda() && has_device_memory()) {
    return setup_.device_memory.allocate(size, c10::typeMetaToScalarType(options.dtype()), device);
  }
  if (device.is_cuda()) {
    const BackendPtr nccl = delegates_.of(at::kCUDA);
    DPT_CHECK_VALUE(
        nccl->supportsTensorAlloc(device.index()),
        {"allocate_tensor on ",
         device.str(),
         ": NCCL allocates none for this device. Ask supports_tensor_alloc first, and use "
         "torch.empty where it says no"});
    return nccl->allocateTensor(size, options);
  }
  DPT_CHECK_VALUE(device.is_cpu(),
                  {"allocate_tensor on ",
                   device.str(),
                   ": there is registered memory for cpu and cuda; use torch.empty"});
  DPT_CHECK_VALUE(options.layout() == at::kStrided && !options.pinned_memory(),
                  {"allocate_tensor makes dense tensors that are not pinned; use torch.empty"});
  return at::detail::empty_generic({size},
                                   &RegisteredAllocator::of(setup_.api),
                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   c10::typeMetaToScalarType(options.dtype()),
                                   std::nullopt);
}

}  // namespace dpt::c10d_adapter
