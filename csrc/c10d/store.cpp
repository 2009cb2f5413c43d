#include "store.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

#include "convert.hpp"

namespace dpt::c10d_adapter {
namespace {

constexpr std::chrono::microseconds kFirstPause{200};
constexpr std::chrono::microseconds kLongestPause{10000};
constexpr std::chrono::milliseconds kBetweenCalls{1000};

dpt_status failed(const std::exception& caught, dpt_error* error) {
  std::strncpy(error->message, text_of(caught).c_str(), sizeof error->message - 1);
  return DPT_ERR_SYSTEM;
}

dpt_status set(void* context, const char* key, const void* data, size_t bytes, dpt_error* error) {
  try {
    const auto* begin = static_cast<const uint8_t*>(data);
    static_cast<c10d::Store*>(context)->set(key, std::vector<uint8_t>(begin, begin + bytes));
    return DPT_OK;
  } catch (const std::exception& caught) {
    return failed(caught, error);
  }
}

dpt_status get(void* context,
               const char* key,
               int64_t timeout_ms,
               void* data,
               size_t capacity,
               size_t* bytes,
               dpt_error* error) {
  auto* store = static_cast<c10d::Store*>(context);
  try {
    if (!await_keys(*store, {key}, std::chrono::milliseconds(timeout_ms))) return DPT_ERR_TIMEOUT;
    const std::vector<uint8_t> value = store->get(key);
    *bytes = value.size();
    std::memcpy(data, value.data(), std::min(capacity, value.size()));
    return DPT_OK;
  } catch (const std::exception& caught) {
    return failed(caught, error);
  }
}

}  // namespace

dpt_store store_table(c10d::Store* store) { return {store, set, get}; }

// Asks again and again rather than waits. A TCPStore logs a warning for each wait that times out.
// During a wait it can't be interrupted, and no other thread can use it.
bool await_keys(c10d::Store& store,
                const std::vector<std::string>& keys,
                std::chrono::milliseconds limit,
                const OnWait& on_wait) {
  const auto begin = std::chrono::steady_clock::now();
  auto next_call = kBetweenCalls;
  auto pause = kFirstPause;
  while (!store.check(keys)) {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - begin);
    if (waited >= limit) return false;
    if (on_wait && waited >= next_call) {
      on_wait(keys, waited);
      next_call += kBetweenCalls;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return true;
}

bool wait_for_keys(c10d::Store& store,
                   const std::vector<std::string>& keys,
                   std::chrono::milliseconds limit) {
  try {
    return await_keys(store, keys, limit);
  } catch (const std::exception&) {
    return false;  // who keeps it has gone, or it has no such function
  }
}

}  // namespace dpt::c10d_adapter
