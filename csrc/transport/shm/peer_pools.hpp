// Maps the memory pools of peer processes here: each file once, however many groups share it, and
// no longer than one of them does. Pools are known by the file, since a process that had left all
// of its groups has another one for the next.
#pragma once

#include <sys/stat.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "transport/shm/fd_exchange.hpp"

namespace dpt {

// One peer's pool. Not mapped in children of fork().
class MappedPool {
 public:
  // Throws Error(DPT_ERR_SYSTEM). The descriptor is not needed afterwards.
  explicit MappedPool(const UniqueFd& file);
  ~MappedPool();
  MappedPool(const MappedPool&) = delete;
  MappedPool& operator=(const MappedPool&) = delete;
  char* base() const { return base_; }

 private:
  char* base_;
  size_t bytes_;
};

// Thread safety: all functions from any thread.
class PeerPools {
 public:
  // The pool in `file`, mapped now unless a group holds it already. Throws Error(DPT_ERR_SYSTEM).
  std::shared_ptr<const MappedPool> map(const UniqueFd& file);
  // How many pools are mapped.
  size_t size() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<const MappedPool>> mapped_;
};

}  // namespace dpt
