#include "transport/shm/keyed_socket.hpp"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/error.hpp"
#include "bootstrap/exchange.hpp"

namespace dpt {
namespace {

constexpr size_t kMostBytes = 128 << 10;  // of a datagram

// From now on the kernel drops what does not begin with `key`; see NOTE [Key].
void filter(int fd, const std::string& key) {
  std::vector<sock_filter> program;
  const size_t words = key.size() / sizeof(uint32_t);
  for (size_t i = 0; i < words; ++i) {
    uint32_t word = 0;
    std::memcpy(&word, key.data() + i * sizeof word, sizeof word);
    const auto offset = static_cast<uint32_t>(i * sizeof word);
    // Another word: over the rest of the comparisons and what follows them.
    const auto to_end = static_cast<uint8_t>(2 * (words - 1 - i) + 1);
    program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offset));  // drops what is too short
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(word), 0, to_end));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, UINT32_MAX));  // the whole datagram
  program.push_back(BPF_STMT(BPF_RET | BPF_K, 0));
  const sock_fprog whole{static_cast<uint16_t>(program.size()), program.data()};
  setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &whole, sizeof whole);  // else `receive` drops it
}

std::string name_of(int fd) {
  constexpr socklen_t kNameOffset = offsetof(sockaddr_un, sun_path) + 1;
  sockaddr_un address{};
  socklen_t length = sizeof address;
  DPT_SYS_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length));
  if (length <= kNameOffset) throw Error(DPT_ERR_SYSTEM, "a local socket got no name");
  return {address.sun_path + 1, length - kNameOffset};
}

}  // namespace

KeyedSocket KeyedSocket::make() {
  KeyedSocket made;
  made.address_.key = random_id();
  made.fd_ = UniqueFd(DPT_SYS_CHECK(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)));
  filter(made.fd(), made.address_.key);
  if (!ask_for_senders(made.fd())) throw_system_error("setsockopt(SO_PASSCRED)");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  DPT_SYS_CHECK(bind(made.fd(), reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)));
  made.address_.name = name_of(made.fd());
  return made;
}

std::optional<LocalMessage> KeyedSocket::receive() const {
  std::optional<LocalMessage> received = receive_local(fd(), kMostBytes, 0);
  if (!received) return std::nullopt;
  if (received->is_of_this_user() && received->text.starts_with(address_.key)) return received;
  received.reset();  // closes what came with it
  errno = EAGAIN;
  return std::nullopt;
}

}  // namespace dpt
