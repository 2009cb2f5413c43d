// Passing file descriptors between processes of a node (SCM_RIGHTS).
//
// NOTE [Connections] A process that connects makes a pair of sockets and sends one of them to the
// listener's keyed socket. No stranger takes a peer's room there (NOTE [Key] in keyed_socket.hpp).
// The listener's first word on the sent socket is its acceptance, by which the kernel tells whose
// process it is.
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.hpp"
#include "base/wait.hpp"
#include "transport/shm/keyed_socket.hpp"

namespace dpt {

// Listens on a fresh abstract address; `address` receives what `connect_abstract` needs, one word.
KeyedSocket listen_abstract(std::string* address);
// The next connection of a process of this user, or an empty descriptor when `slice` passed.
UniqueFd accept_within(const KeyedSocket& listener, std::chrono::milliseconds slice);
// Does not wait for the listener to accept, but until wait.deadline for room to ask it.
UniqueFd connect_abstract(const std::string& address, const WaitContext& wait);
// Before a connection is used: waits until wait.deadline until the listener has accepted it.
// Error(DPT_ERR_SYSTEM) where it is another user's, or has gone.
void await_acceptance(const UniqueFd& connection, const WaitContext& wait);

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
