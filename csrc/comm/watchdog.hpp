// One thread per process that learns at once when a local peer process dies.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

namespace dpt {

class Watchdog {
 public:
  using OnDeath = std::function<void(const std::string& process)>;

  explicit Watchdog(OnDeath on_death);

  // Takes ownership of `pidfd`; a process already watched keeps its first one.
  void watch(const std::string& process, int pidfd);
  // No group shares this process any more.
  void forget(const std::string& process);
  // In a forked child: the thread does not exist there, only its descriptors do.
  void close_after_fork();

 private:
  void run();
  void wake() const;

  OnDeath on_death_;
  std::mutex mutex_;
  std::unordered_map<std::string, int> pidfds_;
  int wake_fd_;
  std::thread thread_;
};

}  // namespace dpt
