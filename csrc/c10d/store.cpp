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
    // Asked again and again rather than waited for: a TCPStore logs a warning for each wait that
    // times out, and cannot be interrupted in one.
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    auto pause = kFirstPause;
    while (!store->check({key})) {
      if (std::chrono::steady_clock::now() >= end) return DPT_ERR_TIMEOUT;
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
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

bool wait_for_keys(c10d::Store& store,
                   const std::vector<std::string>& keys,
                   std::chrono::milliseconds limit) {
  try {
    const auto end = std::chrono::steady_clock::now() + limit;
    auto pause = kFirstPause;
    while (!store.check(keys)) {
      if (std::chrono::steady_clock::now() >= end) return false;
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
    return true;
  } catch (const std::exception&) {
    return false;  // who keeps it has gone, or it has no such function
  }
}

}  // namespace dpt::c10d_adapter
