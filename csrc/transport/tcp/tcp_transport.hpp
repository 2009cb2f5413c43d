// TCP between the nodes of a group: every rank connects to its partners on the other nodes.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/wait.hpp"
#include "bootstrap/store.hpp"
#include "transport/node_layout.hpp"
#include "transport/shm/shm_transport.hpp"
#include "transport/tcp/connection.hpp"
#include "transport/tcp/dialing.hpp"
#include "transport/transport.hpp"

namespace dpt {

// Ranks of one node by shared memory, nodes among each other by TCP.
extern const Transport kTcpTransport;

// Connections that know each other and carry nothing yet.
struct TcpConnection {
  std::map<int, Connection::Peer> peers;  // by rank in the group
  std::string why_not;                    // not empty: the same text on every rank
};

struct TcpGroup {
  Store& store;
  std::string key;  // prefix of this group's keys, fresh for every meeting
  int rank;
  const std::vector<int64_t>& global_ranks;
  const NodeLayout& layout;
  bool same_host;  // all ranks share a network namespace: emulated nodes
  TcpSettings settings;
};

// Collective over the group's ranks. Throws on timeout and interrupt; a rank that cannot connect
// makes every rank return the same `why_not`.
TcpConnection connect_tcp(const TcpGroup& group, const WaitContext& wait);

}  // namespace dpt
