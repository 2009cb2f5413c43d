#include "backend.hpp"

#include <ATen/Context.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "python_bridge.hpp"

namespace dpt::c10d_adapter {
namespace {

// Every backend that is alive, for finish_all.
std::mutex live_mutex;
std::set<Backend*>& live() {
  static auto* const backends = new std::set<Backend*>;
  return *backends;
}

}  // namespace

Backend::Backend(GroupSetup setup)
    : c10d::Backend(setup.rank, setup.size), setup_(std::move(setup)) {
  init();
  native_.make();
  const std::lock_guard lock(live_mutex);
  live().insert(this);
}

Backend::~Backend() {
  {
    const std::lock_guard lock(live_mutex);
    live().erase(this);
  }
  // Delegates end their threads too, and one of those may be waiting for Python's lock.
  without_gil([&] {
    native_.destroy();
    delegates_.settle();
    delegates_.clear();
    tell_closed();
  });
}

c10::intrusive_ptr<c10d::Backend::Options> Backend::getBackendOptions() {
  return c10::static_intrusive_pointer_cast<c10d::Backend::Options>(setup_.options);
}

bool Backend::supportsCoalescing() const { return at::hasCUDA(); }

void Backend::setTimeout(Milliseconds timeout) {
  timeout = std::min(timeout, kLongestWait);
  setup_.options->timeout = timeout;
  delegates_.set_timeout(timeout);
}

// c10d passes the device's index alone. CPU devices have none as a rule, and accelerators have one
// where it matters (FSDP2).
bool Backend::supportsTensorAlloc(c10::DeviceIndex index) {
  if (index < 0 && barrier_device_.is_cpu()) return memory_.is_on_host();
  return memory_.is_on_device(index);
}

c10d::ErrorType Backend::getError() { return delegates_.error(); }

void Backend::abort() {
  native_.abort("the process group was aborted (ProcessGroup.abort)");
  delegates_.abort();
}

bool Backend::end_native() {
  native_.end();
  bool are_abandoned = false;
  without_gil([&] { are_abandoned = delegates_.settle(); });
  return are_abandoned;
}

void Backend::leave() { end_native(); }

void Backend::rejoin() {
  if (!native_.is_open()) without_gil([&] { native_.make(); });
}

void Backend::tell_closed() {
  if (const auto closed = std::exchange(setup_.hooks.closed, nullptr)) closed();
}

void Backend::shutdown() {
  const bool are_abandoned = end_native();
  without_gil([&] {
    delegates_.shutdown(are_abandoned);
    tell_closed();
  });
}

void Backend::finish_all() {
  std::set<Backend*> backends;
  {
    const std::lock_guard lock(live_mutex);
    backends = live();
  }
  for (Backend* backend : backends) backend->end_native();
}

void Backend::check_root(const char* op, int64_t root) const {
  DPT_CHECK_VALUE(root >= 0 && root < size_,
                  {op,
                   " on rank ",
                   std::to_string(rank_),
                   ": root ",
                   std::to_string(root),
                   " is not a rank of this group of ",
                   std::to_string(size_)});
}

}  // namespace dpt::c10d_adapter
