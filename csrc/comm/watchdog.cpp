#include "comm/watchdog.hpp"

#include <poll.h>
#include <unistd.h>

#include <vector>

#include "base/error.hpp"
#include "base/thread.hpp"
#include "bootstrap/exchange.hpp"

namespace dpt {
namespace {

constexpr int kTickMs = 200;

}  // namespace

Watchdog::Watchdog(OnDeath on_death, OnTick on_tick)
    : on_death_(std::move(on_death)),
      on_tick_(std::move(on_tick)),
      waker_(Waker::make()),
      thread_(start_thread([this] { run(); })) {}

Watchdog::~Watchdog() {
  stopping_ = true;
  waker_.wake();
  thread_.join();
}

void Watchdog::watch(const std::string& process, UniqueFd pidfd, const std::string& mark) {
  {
    std::lock_guard lock(mutex_);
    if (!peers_.try_emplace(process, Peer{std::move(pidfd), mark}).second) return;
  }
  waker_.wake();
}

void Watchdog::forget(const std::string& process) {
  {
    std::lock_guard lock(mutex_);
    if (peers_.erase(process) == 0) return;
  }
  waker_.wake();
}

void Watchdog::close_after_fork() {
  // No lock: only the forking thread exists here, and another may have held it.
  for (auto& [process, peer] : peers_) peer.pidfd.reset();
  waker_.reset();
}

void Watchdog::run() {
  while (!stopping_) {
    on_tick_();
    std::vector<pollfd> entries = {{waker_.fd(), POLLIN, 0}};
    std::vector<std::string> processes = {""};
    std::vector<std::string> marks = {""};
    {
      std::lock_guard lock(mutex_);
      for (const auto& [process, peer] : peers_) {
        entries.push_back({peer.pidfd.get(), POLLIN, 0});  // poll passes over negative ones
        processes.push_back(process);
        marks.push_back(peer.mark);
      }
    }
    if (poll(entries.data(), entries.size(), kTickMs) < 0) continue;
    waker_.clear();
    for (size_t i = 1; i < entries.size(); ++i) {
      const bool dead = entries[i].fd >= 0 ? (entries[i].revents & POLLIN) != 0
                                           : dead_process(marks[i]).has_value();
      if (!dead) continue;
      {
        std::lock_guard lock(mutex_);
        const auto found = peers_.find(processes[i]);
        // Forgotten meanwhile, and its number perhaps reused: not this process's death.
        if (found == peers_.end() || found->second.pidfd.get() != entries[i].fd) continue;
        peers_.erase(found);
      }
      on_death_(processes[i]);
    }
  }
}

}  // namespace dpt
