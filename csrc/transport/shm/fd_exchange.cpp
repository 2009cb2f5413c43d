#include "transport/shm/fd_exchange.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "bootstrap/exchange.hpp"

namespace dpt {
namespace {

constexpr size_t kMaxText = 512;

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  DPT_CHECK(name.size() + 1 < sizeof address.sun_path);
  // A leading zero byte makes the address abstract: no file, gone with its last descriptor.
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

bool readable_within(int fd, std::chrono::milliseconds slice) {
  pollfd entry{fd, POLLIN, 0};
  const int ready = poll(&entry, 1, static_cast<int>(slice.count()));
  if (ready < 0 && errno != EINTR) throw_system_error("poll");
  return ready > 0;
}

// Only processes of this user may hand us memory or receive ours.
bool is_same_user(const UniqueFd& socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  DPT_SYS_CHECK(getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length));
  return peer.uid == geteuid();
}

ssize_t send_message(const UniqueFd& socket,
                     const std::string& text,
                     const std::vector<int>& fds,
                     int flags) {
  DPT_CHECK(fds.size() <= static_cast<size_t>(kMaxPassedFds) && text.size() <= kMaxText);
  std::string body = text;
  iovec data{body.data(), body.size()};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * fds.size()));
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
  }
  return sendmsg(socket.get(), &message, flags | MSG_NOSIGNAL);
}

// Error(DPT_ERR_SYSTEM) when the peer closed.
ssize_t receive_message(const UniqueFd& socket, Received* received, int flags) {
  char text[kMaxText];
  iovec data{text, sizeof text};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * kMaxPassedFds));
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t bytes = recvmsg(socket.get(), &message, flags | MSG_CMSG_CLOEXEC);
  if (bytes < 0) return bytes;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    std::vector<int> fds(count);
    std::memcpy(fds.data(), CMSG_DATA(header), count * sizeof(int));
    for (const int fd : fds) received->fds.emplace_back(fd);
  }
  if (bytes == 0) throw Error(DPT_ERR_SYSTEM, "a local rank closed the connection while attaching");
  received->text.assign(text, bytes);
  return bytes;
}

}  // namespace

UniqueFd listen_abstract(std::string* address) {
  *address = "deepytorch-" + random_id();
  UniqueFd listener(DPT_SYS_CHECK(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)));
  socklen_t length = 0;
  const sockaddr_un name = abstract_address(*address, &length);
  DPT_SYS_CHECK(bind(listener.get(), reinterpret_cast<const sockaddr*>(&name), length));
  DPT_SYS_CHECK(listen(listener.get(), kMaxPassedFds));
  return listener;
}

UniqueFd accept_within(const UniqueFd& listener, std::chrono::milliseconds slice) {
  if (!readable_within(listener.get(), slice)) return UniqueFd();
  UniqueFd connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (connection.get() >= 0 && !is_same_user(connection)) connection.reset();
  return connection;
}

UniqueFd connect_abstract(const std::string& address) {
  UniqueFd connection(DPT_SYS_CHECK(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)));
  socklen_t length = 0;
  const sockaddr_un name = abstract_address(address, &length);
  DPT_SYS_CHECK(connect(connection.get(), reinterpret_cast<const sockaddr*>(&name), length));
  if (!is_same_user(connection)) {
    throw Error(DPT_ERR_SYSTEM, "the group's socket belongs to another user");
  }
  return connection;
}

void send_fds(const UniqueFd& socket, const std::string& text, const std::vector<int>& fds) {
  if (send_message(socket, text, fds, 0) < 0) throw_system_error("sendmsg");
}

bool try_send_fds(const UniqueFd& socket, const std::string& text, const std::vector<int>& fds) {
  if (send_message(socket, text, fds, MSG_DONTWAIT) >= 0) return true;
  // The last: too many descriptors are on their way; the receivers will take them.
  if (errno == EAGAIN || errno == EINTR || errno == ENOBUFS || errno == ETOOMANYREFS) return false;
  throw_system_error("sendmsg");
}

Received receive_fds(const UniqueFd& socket, const WaitContext& wait) {
  while (!readable_within(socket.get(), wait.deadline.next_slice())) {
    wait.check();
    if (wait.deadline.expired()) {
      throw Error(DPT_ERR_TIMEOUT, wait.describe() + ": a local rank did not answer in time");
    }
  }
  Received received;
  if (receive_message(socket, &received, 0) < 0) throw_system_error("recvmsg");
  return received;
}

std::optional<Received> try_receive_fds(const UniqueFd& socket) {
  Received received;
  if (receive_message(socket, &received, MSG_DONTWAIT) >= 0) return received;
  if (errno == EAGAIN || errno == EINTR) return std::nullopt;
  throw_system_error("recvmsg");
}

}  // namespace dpt
