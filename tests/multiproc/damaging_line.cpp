// In front of the C library's sendmsg: once `damaging` is set, a bit of what goes to another node
// changes on the way. It is told by its header of 40 bytes, which begins with a word of its own.
#include <dlfcn.h>
#include <sys/socket.h>

#include <cstring>
#include <vector>

extern "C" {

int damaging = 0;
int damaged = 0;

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  using Send = ssize_t (*)(int, const msghdr*, int);
  static const auto real = reinterpret_cast<Send>(dlsym(RTLD_NEXT, "sendmsg"));
  constexpr size_t kHeaderBytes = 40;
  constexpr size_t kPlace = 3;
  const iovec* parts = message->msg_iov;
  if (damaging == 0 || message->msg_iovlen != 2 || parts[0].iov_len != kHeaderBytes ||
      std::memcmp(parts[0].iov_base, "DPTS", 4) != 0 || parts[1].iov_len <= kPlace) {
    return real(fd, message, flags);
  }
  const char* data = static_cast<const char*>(parts[1].iov_base);
  std::vector<char> changed(data, data + parts[1].iov_len);
  changed[kPlace] ^= 0x40;
  iovec other_parts[] = {parts[0], {changed.data(), changed.size()}};
  msghdr other = *message;
  other.msg_iov = other_parts;
  const ssize_t sent = real(fd, &other, flags);
  if (sent > static_cast<ssize_t>(kHeaderBytes + kPlace)) ++damaged;
  return sent;
}
}
