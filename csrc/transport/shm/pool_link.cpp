#include "transport/shm/pool_link.hpp"

#include <poll.h>

#include <cstring>

#include "base/error.hpp"
#include "base/log.hpp"

namespace dpt {

void PoolLink::post(const ChunkMessage& message, std::shared_ptr<const UniqueFd> file) {
  {
    std::lock_guard lock(mutex_);
    posted_.push_back({message, std::move(file)});
  }
  wake_();
}

bool PoolLink::flush() {
  std::lock_guard lock(mutex_);
  while (!posted_.empty()) {
    const Posted& next = posted_.front();
    const std::string text(reinterpret_cast<const char*>(&next.message), sizeof next.message);
    std::vector<int> fds;
    if (next.file) fds.push_back(next.file->get());
    if (!try_send_fds(socket_, text, fds)) return false;
    posted_.pop_front();
  }
  return true;
}

std::optional<ChunkMessage> PoolLink::receive(UniqueFd* file) {
  std::optional<Received> received = try_receive_fds(socket_);
  if (!received) return std::nullopt;
  ChunkMessage message{};
  if (received->text.size() != sizeof message) {
    throw Error(DPT_ERR_SYSTEM, "a local process sent a malformed message about its memory");
  }
  std::memcpy(&message, received->text.data(), sizeof message);
  file->reset();
  if (received->fds.size() == 1) *file = std::move(received->fds.front());
  return message;
}

bool PoolLink::has_ended() const {
  pollfd entry{socket_.get(), 0, 0};
  return poll(&entry, 1, 0) == 1 && (entry.revents & (POLLHUP | POLLERR)) != 0;
}

void PoolLink::set_broken(const std::string& reason) {
  broken_ = true;
  late_ = true;
  log(LogLevel::kWarning,
      "registered device memory is no longer shared with a peer, so collectives treat new memory "
      "as "
      "ordinary memory: " +
          reason);
}

}  // namespace dpt
