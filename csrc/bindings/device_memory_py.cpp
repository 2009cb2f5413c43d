// Registered device memory for PyTorch's caching allocator: two functions as its pluggable
// allocators are (deepytorch_core/c10d/device_memory.py), and what Python asks about the memory.
#include <pybind11/pybind11.h>
#include <sys/types.h>

#include <atomic>
#include <string>

#include "base/error.hpp"
#include "base/log.hpp"
#include "bindings/register.hpp"
#include "cuda/device_group.hpp"
#include "cuda/device_pool.hpp"

namespace py = pybind11;

#define DPT_EXPORT extern "C" __attribute__((visibility("default")))

// nullptr is taken for "out of memory".
DPT_EXPORT void* deepytorch_device_allocate(ssize_t bytes, int device, void*) {
  try {
    return dpt::cuda::DevicePool::of(device).allocate(static_cast<size_t>(bytes));
  } catch (const std::exception& error) {
    static std::atomic<bool> told{false};
    if (!told.exchange(true)) {
      dpt::log(dpt::LogLevel::kError,
               std::string("registered device memory can't be had, which torch reports as out of "
                           "memory: ") +
                   error.what() + ". Use ordinary tensors");
    }
    return nullptr;
  }
}

DPT_EXPORT void deepytorch_device_free(void* address, ssize_t, int device, void*) {
  try {
    dpt::cuda::DevicePool::of(device).free(static_cast<char*>(address));
  } catch (const std::exception&) {
    // The driver is gone, at the process's end.
  }
}

namespace dpt {

void register_device_memory(py::module_& m) {
  m.def(
      "why_no_device_memory",
      [] { return DeviceGroup::why_absent(); },
      "Why this process has no registered device memory; empty: it can have.");
  m.def(
      "device_memory",
      [](int device) {
        const cuda::DevicePool& pool = cuda::DevicePool::of(device);
        py::dict result;
        result["chunk_bytes"] = pool.chunk_bytes();
        result["shared_bytes"] = pool.shared_bytes();
        return result;
      },
      py::arg("device"),
      "Bytes of registered memory on a device: what torch's allocator holds of it, and how much of "
      "that every peer process has mapped by now. RuntimeError where there are no GPU kernels.");
  m.def(
      "landing_calls",
      &DeviceGroup::landing_calls,
      "How many operations of this process had outputs that their peers' kernels could write to.");
  m.def(
      "is_shared_on_device",
      [](uintptr_t address, size_t bytes, int device) {
        return cuda::DevicePool::of(device).is_shared(reinterpret_cast<const void*>(address),
                                                      bytes);
      },
      py::arg("address"),
      py::arg("bytes"),
      py::arg("device"),
      "Whether [address, address + bytes) is registered memory that every peer process has mapped. "
      "RuntimeError where there are no GPU kernels.");
}

}  // namespace dpt
