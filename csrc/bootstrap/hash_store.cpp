#include "bootstrap/hash_store.hpp"

namespace dpt {

void HashStore::set(const std::string& key, const std::string& value) {
  std::lock_guard lock(mutex_);
  values_[key] = value;
  changed_.notify_all();
}

std::optional<std::string> HashStore::get(const std::string& key,
                                          std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const bool found =
      changed_.wait_for(lock, timeout, [&] { return values_.find(key) != values_.end(); });
  if (!found) return std::nullopt;
  return values_[key];
}

}  // namespace dpt
