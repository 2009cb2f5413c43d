// Passing file descriptors between processes over abstract UNIX sockets (SCM_RIGHTS).
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.hpp"
#include "base/wait.hpp"

namespace dpt {

// Most descriptors the kernel passes in one message (SCM_MAX_FD).
constexpr int kMaxPassedFds = 253;

// Listens on a fresh abstract address; `address` receives its name.
UniqueFd listen_abstract(std::string* address);
// The next connection of a process of this user, or an empty descriptor when `slice` passed.
UniqueFd accept_within(const UniqueFd& listener, std::chrono::milliseconds slice);
UniqueFd connect_abstract(const std::string& address);

// One message: a short text and descriptors.
void send_fds(const UniqueFd& socket, const std::string& text, const std::vector<int>& fds);
struct Received {
  std::string text;
  std::deque<UniqueFd> fds;
};
// Waits until wait.deadline; Error(DPT_ERR_SYSTEM) when the peer closed.
Received receive_fds(const UniqueFd& socket, const WaitContext& wait);

// The same without waiting: false where the socket has no room, nothing where no message is there.
bool try_send_fds(const UniqueFd& socket, const std::string& text, const std::vector<int>& fds);
std::optional<Received> try_receive_fds(const UniqueFd& socket);

}  // namespace dpt
