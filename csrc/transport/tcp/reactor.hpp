// One thread per process that waits for the sockets of all groups (epoll) and tells their owners
// which are ready. It starts with the first socket, sleeps while nothing happens, and ends with the
// last socket.
//
// Thread safety: any thread. Handlers run on the reactor's thread, one at a time; after `remove`
// has returned the handler is not running and will not be called again. A handler may call
// everything but `remove`.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "base/unique_fd.hpp"
#include "base/waker.hpp"

namespace dpt {

class Reactor {
 public:
  // `events` as epoll reports them.
  using OnReady = std::function<void(uint32_t events)>;
  using OnTick = std::function<void()>;
  static constexpr std::chrono::milliseconds kTick{250};

  // Returns a number for the calls below. `on_tick` (may be empty) is called every kTick from now
  // on, `on_ready` once `fd` is watched.
  uint64_t add(int fd, OnReady on_ready, OnTick on_tick);
  // `events` to wait for from now on, besides errors and hang-ups, which are always reported.
  void watch(uint64_t id, int fd, uint32_t events) const;
  // Nothing is reported any more, not even errors, until it is watched again.
  void silence(int fd) const;
  void remove(uint64_t id, int fd);
  // Takes connections that this side has ended. It reads and drops what still comes until the peer
  // ends them too or time is up. Otherwise closing them would destroy what the peer has yet to
  // read.
  void linger(std::vector<UniqueFd> sockets);
  // In a forked child: the thread does not exist there, only its descriptors do.
  void close_after_fork();

 private:
  struct Handler {
    int fd;
    OnReady on_ready;
    OnTick on_tick;
  };
  struct Lingering {
    UniqueFd fd;
    std::chrono::steady_clock::time_point until;
  };

  void start();
  bool is_needed() const { return !handlers_.empty() || !lingering_.empty(); }
  void run();
  void tick();
  void drain(std::chrono::steady_clock::time_point now);

  std::mutex dispatch_mutex_;  // guards what follows, and is held while handlers run
  std::map<uint64_t, Handler> handlers_;
  std::vector<Lingering> lingering_;
  uint64_t next_id_ = 1;
  // The thread that runs has these; none: there is no such thread.
  UniqueFd epoll_;
  Waker waker_;
};

}  // namespace dpt
