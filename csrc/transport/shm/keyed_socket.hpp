// Datagrams between the processes of a node that come through whatever strangers send.
//
// NOTE [Key] Any user of the machine may send to an abstract address, and the kernel keeps about
// ten datagrams until the addressee reads them. So a stranger could see to it that a peer's finds
// no room. Therefore each datagram begins with its addressee's key, which peers have from the
// store, and the kernel drops all others before they take any (SO_ATTACH_FILTER). They wake nobody
// either. A socket that listens for connections is no way out: strangers fill its backlog, which
// nothing filters. The store asks nobody who he is, so a key alone proves little, and the kernel is
// also asked whose process has sent what came. In a sandbox without filters both are looked at too
// late to save the room.
#pragma once

#include <optional>
#include <string>

#include "transport/shm/local_message.hpp"

namespace dpt {

// Tells senders where a socket's datagrams go, and what they begin with.
struct KeyedAddress {
  std::string name;  // abstract, without its leading zero byte
  std::string key;   // 32 characters
};

// Thread safety: all functions from any thread, except reset.
class KeyedSocket {
 public:
  // Has no descriptor and no address.
  KeyedSocket() = default;
  // On an abstract name that the kernel picks. Throws Error(DPT_ERR_SYSTEM).
  static KeyedSocket make();

  int fd() const { return fd_.get(); }
  const KeyedAddress& address() const { return address_; }
  // Waits for a datagram. It is one of a process of this user and begins with the key; nothing,
  // with errno: EAGAIN after any other.
  std::optional<LocalMessage> receive() const;
  void reset() { fd_.reset(); }

 private:
  UniqueFd fd_;
  KeyedAddress address_;
};

}  // namespace dpt
