// An in-memory store for tests whose ranks are threads of one process.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>

#include "bootstrap/store.hpp"

namespace dpt {

class HashStore : public Store {
 public:
  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key,
                                 std::chrono::milliseconds timeout) override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace dpt
