// One group's connections to ranks of other nodes.
//
// Lifecycle: destroyed before the segment that `Connection::Host` speaks for. Thread safety: as
// Connection.
#pragma once

#include <map>
#include <memory>

#include "transport/tcp/connection.hpp"

namespace dpt {

class Links {
 public:
  using Mover = Connection::Mover;

  void add(int rank, Connection::Peer peer, const Connection::Host& host) {
    connections_[rank] = std::make_unique<Connection>(std::move(peer), host);
  }
  // The connection to a rank of the group that this one has a link to.
  Connection& to(int rank) const {
    const auto found = connections_.find(rank);
    DPT_CHECK(found != connections_.end());
    return *found->second;
  }
  void cancel() const {
    for (const auto& [rank, connection] : connections_) connection->cancel();
  }
  // Tells every peer.
  void abort(dpt_status status, const std::string& reason) const {
    for (const auto& [rank, connection] : connections_) connection->abort(status, reason);
  }

 private:
  std::map<int, std::unique_ptr<Connection>> connections_;
};

}  // namespace dpt
