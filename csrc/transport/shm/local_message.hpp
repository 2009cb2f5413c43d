// One message over a UNIX socket: a text, descriptors (SCM_RIGHTS), and whose process sent it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.hpp"

namespace dpt {

// Most descriptors the kernel passes in one message (SCM_MAX_FD).
constexpr int kMaxPassedFds = 253;

struct LocalMessage {
  std::string text;
  std::deque<UniqueFd> fds;
  std::string from;             // the abstract name of the sending socket, if it has one
  std::optional<uid_t> sender;  // whose process sent it, where the socket asks (`ask_for_senders`)

  bool is_of_this_user() const;
};

// False with errno. `to`: the abstract name that it goes to, for a socket without a connection.
bool send_local(int fd,
                const std::string& text,
                const std::vector<int>& fds,
                int flags,
                const std::string& to = "");
// Nothing, with errno, when there is none. What is longer than `most_bytes` is cut off.
std::optional<LocalMessage> receive_local(int fd, size_t most_bytes, int flags);

// From now on the kernel says of each message whose process sent it (SO_PASSCRED). False with
// errno.
bool ask_for_senders(int fd);

// True once a message or the end is there; false when `slice` passed or a signal came.
bool readable_within(int fd, std::chrono::milliseconds slice);

}  // namespace dpt
