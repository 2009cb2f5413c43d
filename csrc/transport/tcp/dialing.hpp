// Making a rank's connections to its peers on other nodes: all at once, each side proving that it
// belongs, strangers and stragglers kept out.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/wait.hpp"
#include "transport/tcp/connection.hpp"
#include "transport/tcp/handshake.hpp"
#include "transport/tcp/interfaces.hpp"

namespace dpt {

struct TcpSettings {
  std::vector<std::string> ifnames;
  int num_sockets = 0;  // 0: ours
  size_t socket_bytes = 0;
  std::string congestion;
  bool checksum = false;
  static TcpSettings from_env();
};

// A rank's listening socket on one of its interfaces.
struct Listener {
  UniqueFd fd;
  Interface interface;
  SocketAddress address;
};

// A rank listens here, as it tells the others.
struct Endpoint {
  SocketAddress address;
  std::string interface;
};

Listener listen_on(const Interface& interface, const TcpSettings& settings);

// Whom a rank connects to: every peer has its endpoints; ranks below this one are called, the
// others call.
struct Dialing {
  Acquaintance own;
  const std::vector<Listener>& listeners;
  std::map<int, std::vector<Endpoint>> peers;
  std::map<int, std::string> names;  // of the peers, for messages
  const TcpSettings& settings;
  // Asked now and then; throws when the connections are not wanted any more.
  std::function<void()> check;
};

// Every peer's sockets, the control socket last. Error(DPT_ERR_SYSTEM) names the peer that can't be
// reached, by which interface, and why; or those that did not call before `limit`.
std::map<int, std::vector<UniqueFd>> dial(const Dialing& dialing, std::chrono::milliseconds limit);

}  // namespace dpt
