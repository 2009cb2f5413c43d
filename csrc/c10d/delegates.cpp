#include "delegates.hpp"

#include "python_bridge.hpp"

namespace dpt::c10d_adapter {
namespace {

constexpr const char* kCpu = "cpu";

}  // namespace

[[gnu::hot]] BackendPtr Delegates::of(const at::Device& device, Milliseconds limit) {
  BackendPtr& known = known_[device.is_cuda() ? 1 : 0];
  const bool is_usual = device.is_cuda() || device.is_cpu();
  if (is_usual) {
    std::lock_guard lock(mutex_);
    if (known) return known;
  }
  BackendPtr made = for_type(c10::DeviceTypeName(device.type(), /*lower_case=*/true), limit);
  if (!is_usual) return made;
  std::lock_guard lock(mutex_);
  return known = std::move(made);
}

[[gnu::cold, gnu::noinline]] BackendPtr Delegates::for_type(const std::string& device_type,
                                                            Milliseconds limit) {
  const std::chrono::duration<double> limit_s = limit;
  return make_once(device_type, [&] { return setup_.stock.make(device_type, limit_s.count()); });
}

[[gnu::cold, gnu::noinline]] BackendPtr Delegates::by_nodes(const std::string& device_type,
                                                            const int* node_of) {
  return make_once(device_type + " by nodes", [&] {
    return setup_.stock.make_by_nodes(device_type, {node_of, node_of + setup_.size});
  });
}

[[gnu::cold, gnu::noinline]] BackendPtr Delegates::make_once(
    const std::string& key, const std::function<BackendPtr()>& make) {
  std::lock_guard making(making_mutex_);
  {
    std::lock_guard lock(mutex_);
    const auto found = backends_.find(key);
    if (found != backends_.end()) return found->second;
  }
  BackendPtr made = make();
  std::lock_guard lock(mutex_);
  if (later_timeout_) made->setTimeout(*later_timeout_);  // it may be older than we are
  return backends_.emplace(key, std::move(made)).first->second;
}

void Delegates::set_timeout(Milliseconds timeout) {
  std::lock_guard lock(mutex_);
  later_timeout_ = timeout;
  for (auto& [device, backend] : backends_) backend->setTimeout(timeout);
}

c10d::ErrorType Delegates::error() {
  std::lock_guard lock(mutex_);
  for (auto& [device, backend] : backends_) {
    if (device == kCpu) continue;  // gloo has no such question
    const c10d::ErrorType error = backend->getError();
    if (error != c10d::ErrorType::SUCCESS) return error;
  }
  return c10d::ErrorType::SUCCESS;
}

void Delegates::abort() {
  std::map<std::string, BackendPtr> backends;
  {
    std::lock_guard lock(mutex_);
    backends = backends_;
  }
  for (auto& [device, backend] : backends) backend->abort();
}

void Delegates::abandon(std::function<bool()> is_starting) {
  std::vector<BackendPtr> backends;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [device, backend] : backends_) {
      if (device != kCpu) backends.push_back(backend);
    }
  }
  if (backends.empty()) return;
  abandonment_.begin(std::move(backends), std::move(is_starting));
}

void Delegates::shutdown(bool are_abandoned) {
  std::map<std::string, BackendPtr> backends;
  {
    std::lock_guard lock(mutex_);
    backends.swap(backends_);
    known_ = {};
  }
  without_gil([&] {
    for (auto& [device, backend] : backends) {
      if (!are_abandoned || device == kCpu) backend->shutdown();
    }
    backends.clear();
  });
}

void Delegates::clear() {
  backends_.clear();
  known_ = {};
}

}  // namespace dpt::c10d_adapter
