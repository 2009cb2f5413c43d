#include "transport/shm/local_message.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/error.hpp"

namespace dpt {
namespace {

// A leading zero byte makes an address abstract: no file, gone with its last descriptor.
constexpr socklen_t kNameOffset = offsetof(sockaddr_un, sun_path) + 1;

}  // namespace

// Real users on both sides: that is what the kernel tells of a sender.
bool LocalMessage::is_of_this_user() const { return sender == getuid(); }

bool send_local(int fd,
                const std::string& text,
                const std::vector<int>& fds,
                int flags,
                const std::string& to) {
  DPT_CHECK(fds.size() <= static_cast<size_t>(kMaxPassedFds));
  sockaddr_un address{};
  socklen_t length = 0;  // none: the other end of the connection
  if (!to.empty()) {
    if (to.size() >= sizeof address.sun_path) {
      errno = EINVAL;
      return false;
    }
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, to.data(), to.size());
    length = static_cast<socklen_t>(kNameOffset + to.size());
  }
  flags |= MSG_NOSIGNAL;
  if (fds.empty()) {  // also where a container's profile denies sendmsg
    const auto* const name = length > 0 ? reinterpret_cast<const sockaddr*>(&address) : nullptr;
    return sendto(fd, text.data(), text.size(), flags, name, length) >= 0;
  }
  std::string body = text;
  iovec data{body.data(), body.size()};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * fds.size()));
  msghdr message{};
  message.msg_name = length > 0 ? &address : nullptr;
  message.msg_namelen = length;
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
  std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
  return sendmsg(fd, &message, flags) >= 0;
}

std::optional<LocalMessage> receive_local(int fd, size_t most_bytes, int flags) {
  sockaddr_un from{};
  LocalMessage received;
  received.text.resize(most_bytes);
  iovec data{received.text.data(), most_bytes};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * kMaxPassedFds) + CMSG_SPACE(sizeof(ucred)));
  msghdr message{};
  message.msg_name = &from;
  message.msg_namelen = sizeof from;
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t bytes = recvmsg(fd, &message, flags | MSG_CMSG_CLOEXEC);
  if (bytes < 0) return std::nullopt;
  received.text.resize(static_cast<size_t>(bytes));
  if (message.msg_namelen > kNameOffset) {
    received.from.assign(from.sun_path + 1, message.msg_namelen - kNameOffset);
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET) continue;
    if (header->cmsg_type == SCM_RIGHTS) {
      std::vector<int> fds((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
      std::memcpy(fds.data(), CMSG_DATA(header), fds.size() * sizeof(int));
      for (const int each : fds) received.fds.emplace_back(each);
    } else if (header->cmsg_type == SCM_CREDENTIALS) {
      ucred sender{};
      std::memcpy(&sender, CMSG_DATA(header), sizeof sender);
      received.sender = sender.uid;
    }
  }
  return received;
}

bool ask_for_senders(int fd) {
  const int on = 1;
  return setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0;
}

bool readable_within(int fd, std::chrono::milliseconds slice) {
  pollfd entry{fd, POLLIN, 0};
  const int ready = poll(&entry, 1, static_cast<int>(slice.count()));
  if (ready < 0 && errno != EINTR) throw_system_error("poll");
  return ready > 0;
}

}  // namespace dpt
