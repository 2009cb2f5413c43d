#include "transport/tcp/reactor.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/error.hpp"
#include "base/thread.hpp"

namespace dpt {
namespace {

constexpr std::chrono::milliseconds kLingerLimit{2000};
constexpr uint64_t kWakeId = 0;

}  // namespace

void Reactor::start() {
  if (epoll_.get() >= 0) return;
  epoll_ = UniqueFd(DPT_SYS_CHECK(epoll_create1(EPOLL_CLOEXEC)));
  waker_ = Waker::make();
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kWakeId}};
  DPT_SYS_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, waker_.fd(), &event));
  // The fabric that owns the reactor lives as long as the process.
  start_thread([this] { run(); }).detach();
}

uint64_t Reactor::add(int fd, OnReady on_ready, OnTick on_tick) {
  std::lock_guard lock(dispatch_mutex_);
  start();
  const uint64_t id = next_id_++;
  handlers_[id] = {fd, std::move(on_ready), std::move(on_tick)};
  waker_.wake();
  return id;
}

void Reactor::watch(uint64_t id, int fd, uint32_t events) const {
  epoll_event event{.events = events, .data = {.u64 = id}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) == 0) return;
  DPT_SYS_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event));
}

void Reactor::silence(int fd) const { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Reactor::remove(uint64_t id, int fd) {
  std::lock_guard lock(dispatch_mutex_);
  handlers_.erase(id);
  silence(fd);
  if (!is_needed()) waker_.wake();
}

void Reactor::linger(std::vector<UniqueFd> sockets) {
  const auto until = std::chrono::steady_clock::now() + kLingerLimit;
  std::lock_guard lock(dispatch_mutex_);
  start();
  for (UniqueFd& fd : sockets) lingering_.push_back({std::move(fd), until});
  waker_.wake();
}

void Reactor::close_after_fork() {
  // No lock: only the forking thread exists here, and another may have held it.
  for (const auto& [id, handler] : handlers_) close(handler.fd);
  for (Lingering& each : lingering_) each.fd.reset();
  epoll_.reset();
  waker_.reset();
}

void Reactor::drain(std::chrono::steady_clock::time_point now) {
  std::erase_if(lingering_, [&](Lingering& each) {
    char scrap[16 << 10];
    for (;;) {
      const ssize_t got = recv(each.fd.get(), scrap, sizeof scrap, MSG_DONTWAIT);
      if (got > 0) continue;
      const bool open = got < 0 && (errno == EAGAIN || errno == EINTR);
      return !open || now >= each.until;
    }
  });
}

void Reactor::tick() {
  drain(std::chrono::steady_clock::now());
  for (const auto& [id, handler] : handlers_) {
    if (handler.on_tick) handler.on_tick();
  }
}

void Reactor::run() {
  constexpr int kMostEvents = 64;
  epoll_event events[kMostEvents];
  auto next_tick = std::chrono::steady_clock::now() + kTick;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        next_tick - std::chrono::steady_clock::now());
    const int slice = static_cast<int>(std::max<int64_t>(0, left.count()));
    const int count = epoll_wait(epoll_.get(), events, kMostEvents, slice);
    std::lock_guard lock(dispatch_mutex_);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 == kWakeId) {
        waker_.clear();
        continue;
      }
      const auto found = handlers_.find(uint64_t{events[i].data.u64});
      if (found != handlers_.end()) found->second.on_ready(events[i].events);
    }
    if (std::chrono::steady_clock::now() >= next_tick) {
      next_tick = std::chrono::steady_clock::now() + kTick;
      tick();
    }
    if (is_needed()) continue;
    epoll_.reset();
    waker_.reset();
    return;
  }
}

}  // namespace dpt
