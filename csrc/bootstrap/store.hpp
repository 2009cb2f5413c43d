// The key-value store through which the ranks of a group meet.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "deepytorch.h"

namespace dpt {

// Thread safety: implementations may be called from several threads.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // The value, or nothing when the key is still absent after `timeout`.
  virtual std::optional<std::string> get(const std::string& key,
                                         std::chrono::milliseconds timeout) = 0;
};

// A store behind the C ABI (torch's TCPStore, FileStore, ...).
class ForeignStore : public Store {
 public:
  explicit ForeignStore(const dpt_store& store) : store_(store) {}
  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key,
                                 std::chrono::milliseconds timeout) override;

 private:
  dpt_store store_;
};

}  // namespace dpt
