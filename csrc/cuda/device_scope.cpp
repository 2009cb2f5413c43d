#include "cuda/device_scope.hpp"

#include <map>
#include <mutex>

#include "base/thread.hpp"
#include "cuda/driver.hpp"

namespace dpt::cuda {
namespace {

struct Contexts {
  decltype(&::cuDeviceGet) device_of = DPT_DRIVER(cuDeviceGet);
  decltype(&::cuDevicePrimaryCtxRetain) retain = DPT_DRIVER(cuDevicePrimaryCtxRetain);
  decltype(&::cuCtxPushCurrent) push = DPT_DRIVER(cuCtxPushCurrent);
  decltype(&::cuCtxPopCurrent) pop = DPT_DRIVER(cuCtxPopCurrent);

  static const Contexts& get() {
    static const Contexts instance;
    return instance;
  }
};

// The context that the runtime uses on a device; kept for as long as the process lives.
CUcontext context_of(int device) {
  static std::mutex mutex;
  static auto* const kept = new std::map<int, CUcontext>;
  const std::lock_guard lock(mutex);
  CUcontext& context = (*kept)[device];
  if (context == nullptr) {
    CUdevice handle = 0;
    check(Contexts::get().device_of(&handle, device), "cuDeviceGet");
    check(Contexts::get().retain(&context, handle), "cuDevicePrimaryCtxRetain");
  }
  return context;
}

using Exchange = decltype(&::cuThreadExchangeStreamCaptureMode);

Exchange find_exchange() {
  try {
    return DPT_DRIVER(cuThreadExchangeStreamCaptureMode);
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace

DeviceScope::DeviceScope(int device) {
  int before = 0;
  check(cudaGetDevice(&before), "cudaGetDevice");
  if (device == before) return;
  if (is_own_thread) {
    check(cudaSetDevice(device), "cudaSetDevice");
    return;
  }
  check(Contexts::get().push(context_of(device)), "cuCtxPushCurrent");
  pushed_ = true;
}

DeviceScope::~DeviceScope() {
  CUcontext popped = nullptr;
  if (pushed_) Contexts::get().pop(&popped);
}

// The runtime's own would make a context in a thread that has none.
void RelaxedCapture::exchange() {
  static const Exchange exchange = find_exchange();
  if (exchange != nullptr) exchange(&mode_);
}

}  // namespace dpt::cuda
