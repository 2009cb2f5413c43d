#include "comm/watchdog.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <vector>

#include "base/error.hpp"

namespace dpt {

Watchdog::Watchdog(OnDeath on_death)
    : on_death_(std::move(on_death)),
      wake_fd_(DPT_SYS_CHECK(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))),
      thread_([this] { run(); }) {
  // The fabric that owns the watchdog lives as long as the process.
  thread_.detach();
}

void Watchdog::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof one);
}

void Watchdog::watch(const std::string& process, int pidfd) {
  {
    std::lock_guard lock(mutex_);
    if (!pidfds_.emplace(process, pidfd).second) {
      close(pidfd);
      return;
    }
  }
  wake();
}

void Watchdog::forget(const std::string& process) {
  {
    std::lock_guard lock(mutex_);
    const auto found = pidfds_.find(process);
    if (found == pidfds_.end()) return;
    close(found->second);
    pidfds_.erase(found);
  }
  wake();
}

void Watchdog::close_after_fork() {
  // No lock: only the forking thread exists here, and another may have held it.
  for (const auto& [process, pidfd] : pidfds_) close(pidfd);
  close(wake_fd_);
}

void Watchdog::run() {
  for (;;) {
    std::vector<pollfd> entries = {{wake_fd_, POLLIN, 0}};
    std::vector<std::string> processes = {""};
    {
      std::lock_guard lock(mutex_);
      for (const auto& [process, pidfd] : pidfds_) {
        entries.push_back({pidfd, POLLIN, 0});
        processes.push_back(process);
      }
    }
    if (poll(entries.data(), entries.size(), -1) < 0) continue;
    uint64_t count = 0;
    while (read(wake_fd_, &count, sizeof count) > 0) {
    }
    for (size_t i = 1; i < entries.size(); ++i) {
      if ((entries[i].revents & POLLIN) == 0) continue;
      {
        std::lock_guard lock(mutex_);
        const auto found = pidfds_.find(processes[i]);
        // Forgotten meanwhile, and its number perhaps reused: not this process's death.
        if (found == pidfds_.end() || found->second != entries[i].fd) continue;
        close(found->second);
        pidfds_.erase(found);
      }
      on_death_(processes[i]);
    }
  }
}

}  // namespace dpt
