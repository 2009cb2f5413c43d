// One thread per process that learns at once when a local peer process dies, and shows the peers
// that this process lives.
//
// NOTE [Death] A peer's pidfd becomes readable the moment it dies. Where the kernel or a sandbox
// gives none, its process mark is looked up at every tick. Silence alone is never taken for death.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "base/unique_fd.hpp"
#include "base/waker.hpp"

namespace dpt {

class Watchdog {
 public:
  using OnDeath = std::function<void(const std::string& process)>;
  using OnTick = std::function<void()>;

  Watchdog(OnDeath on_death, OnTick on_tick);
  // Ends the thread; not to be called on it.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // `pidfd`: none, and `mark` (own_process_mark of that process) has to do. A process already
  // watched keeps its first one.
  void watch(const std::string& process, UniqueFd pidfd, const std::string& mark);
  // No group shares this process any more.
  void forget(const std::string& process);
  // In a forked child: the thread does not exist there, only its descriptors do.
  void close_after_fork();

 private:
  struct Peer {
    UniqueFd pidfd;
    std::string mark;
  };

  void run();

  OnDeath on_death_;
  OnTick on_tick_;
  std::mutex mutex_;
  std::unordered_map<std::string, Peer> peers_;
  std::atomic<bool> stopping_{false};
  Waker waker_;
  std::thread thread_;
};

}  // namespace dpt
