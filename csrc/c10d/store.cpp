#include "store.hpp"

#include <cstring>
#include <exception>

namespace dpt::c10d_adapter {
namespace {

dpt_status failed(const std::exception& caught, dpt_error* error) {
  std::strncpy(error->message, caught.what(), sizeof error->message - 1);
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
    if (!store->check({key})) {
      try {
        store->wait({key}, std::chrono::milliseconds(timeout_ms));
      } catch (const std::exception&) {
        // Stores say "timed out" each in their own way; what counts is whether the key is there.
        if (!store->check({key})) return DPT_ERR_TIMEOUT;
      }
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

}  // namespace dpt::c10d_adapter
