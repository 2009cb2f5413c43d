// One end of the connection over which two processes tell each other of their chunks of device
// memory.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "transport/shm/fd_exchange.hpp"

namespace dpt {

struct ChunkMessage {
  enum Kind : uint32_t {
    kOffer,  // by the owner, with the chunk's descriptor
    kDrop,   // by the owner: it is being freed
    kMapped,
    kRefused,  // the peer can't map it; a drop is answered all the same
    kDropped,
  };
  Kind kind;
  int32_t device;  // whose chunk it is, as its owner numbers them
  uint64_t id;     // among the owner's chunks of that device, never used again
  uint64_t offset;
  uint64_t bytes;
};

// Thread safety: `post` from any thread, the rest by the thread that drives the link.
class PoolLink {
 public:
  // `wake` makes the driving thread look at what was posted.
  PoolLink(std::string process, UniqueFd socket, std::function<void()> wake)
      : process_(std::move(process)), socket_(std::move(socket)), wake_(std::move(wake)) {}

  // The process at the other end.
  const std::string& process() const { return process_; }
  int socket() const { return socket_.get(); }

  // Never waits. The file is kept until it is sent.
  void post(const ChunkMessage& message, std::shared_ptr<const UniqueFd> file = nullptr);
  // Sends what was posted; false: the rest later. Throws Error(DPT_ERR_SYSTEM) when the other
  // process is gone, as `receive`.
  bool flush();
  // The next message, with its file if it has one; nothing: there is none.
  std::optional<ChunkMessage> receive(UniqueFd* file);

  // It did not answer in time, so nobody waits for it until it does.
  bool is_late() const { return late_.load(std::memory_order_relaxed); }
  void set_late(bool late) { late_.store(late, std::memory_order_relaxed); }

  // The other process has closed its end, which it does by ending.
  bool has_ended() const;
  // Something went wrong at this end. It stays open, lest the other process takes that for a death;
  // what waits for its answers is never shared.
  bool is_broken() const { return broken_.load(std::memory_order_relaxed); }
  void set_broken(const std::string& reason);

  // In a forked child.
  void close_after_fork() { socket_.reset(); }

 private:
  struct Posted {
    ChunkMessage message;
    std::shared_ptr<const UniqueFd> file;
  };

  const std::string process_;
  UniqueFd socket_;
  const std::function<void()> wake_;
  std::atomic<bool> late_{false};
  std::atomic<bool> broken_{false};
  std::mutex mutex_;  // guards what follows
  std::deque<Posted> posted_;
};

}  // namespace dpt
