#include "base/error.hpp"
#include "bootstrap/store.hpp"

namespace dpt {

void ForeignStore::set(const std::string& key, const std::string& value) {
  dpt_error error{};
  const dpt_status status =
      store_.set(store_.context, key.c_str(), value.data(), value.size(), &error);
  if (status != DPT_OK)
    throw Error(status, "rendezvous store: set failed: " + std::string(error.message));
}

std::optional<std::string> ForeignStore::get(const std::string& key,
                                             std::chrono::milliseconds timeout) {
  std::string value(4096, '\0');
  size_t bytes = 0;
  dpt_error error{};
  auto fetch = [&] {
    return store_.get(
        store_.context, key.c_str(), timeout.count(), value.data(), value.size(), &bytes, &error);
  };
  dpt_status status = fetch();
  if (status == DPT_OK && bytes > value.size()) {
    value.resize(bytes);
    status = fetch();
  }
  if (status == DPT_ERR_TIMEOUT) return std::nullopt;
  if (status != DPT_OK)
    throw Error(status, "rendezvous store: get failed: " + std::string(error.message));
  value.resize(bytes);
  return value;
}

}  // namespace dpt
