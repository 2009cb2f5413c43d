#include "abandonment.hpp"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace dpt::c10d_adapter {
namespace {

// A start that takes longer than this waits for the lost rank itself.
constexpr std::chrono::seconds kMostStarting{2};
constexpr std::chrono::milliseconds kLook{5};
// Rather leave a backend behind than keep the process from its end.
constexpr std::chrono::seconds kMostSettling{15};

}  // namespace

struct Abandonment::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool begun = false;
  bool ended = false;
};

std::shared_ptr<Abandonment::State> Abandonment::make_state() { return std::make_shared<State>(); }

void Abandonment::begin(std::vector<c10::intrusive_ptr<c10d::Backend>> backends,
                        std::function<bool()> is_starting) {
  {
    const std::lock_guard lock(state_->mutex);
    if (std::exchange(state_->begun, true)) return;
  }
  std::thread([state = state_,
               backends = std::move(backends),
               is_starting = std::move(is_starting)]() mutable {
    const auto limit = std::chrono::steady_clock::now() + kMostStarting;
    while (is_starting() && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(kLook);
    }
    for (const auto& backend : backends) {
      try {
        backend->abort();
      } catch (const std::exception&) {
        // It is given up either way.
      }
    }
    backends.clear();
    const std::lock_guard lock(state->mutex);
    state->ended = true;
    state->changed.notify_all();
  }).detach();
}

bool Abandonment::settle() const {
  std::unique_lock lock(state_->mutex);
  if (!state_->begun) return false;
  state_->changed.wait_for(lock, kMostSettling, [&] { return state_->ended; });
  return true;
}

}  // namespace dpt::c10d_adapter
