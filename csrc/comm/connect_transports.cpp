#include "comm/connect_transports.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "comm/fabric.hpp"
#include "transport/shm/shm_transport.hpp"
#include "transport/tcp/tcp_transport.hpp"

namespace dpt {

Connection::Host host_of(Segment& segment) {
  return {
      Fabric::instance().reactor(),
      [&segment](dpt_status status, const std::string& reason) { segment.abort(status, reason); },
      [&segment] { segment.throw_if_aborted(); }};
}

namespace {

// Lets the delegate meet while all ranks are here: a message between two nodes is its own, and
// finds two ranks alone.
void wake_delegate(const dpt_delegate& delegate, const WaitContext& wait) {
  if (delegate.execute == nullptr) return;
  float value = 0;
  const void* input = &value;
  void* output = &value;
  dpt_request request{};
  request.collective = DPT_ALL_REDUCE;
  request.dtype = DPT_FLOAT32;
  request.reduce_op = DPT_SUM;
  request.premul_factor = 1;
  request.inputs = &input;
  request.outputs = &output;
  request.count = 1;
  request.timeout_ms = wait.deadline.timeout().count();
  dpt_error error{};
  if (delegate.execute(delegate.context, &request, &error) != DPT_OK) {
    log(LogLevel::kDebug, std::string("the stock backend does not answer: ") + error.message);
  }
}

// Empty, or why the nodes of the group have no connections; the same on every rank.
std::string connect_nodes(const GroupFacts& facts,
                          GroupState& state,
                          const TcpGroup& group,
                          Segment& segment,
                          const WaitContext& wait) {
  TcpConnection connection = connect_tcp(group, wait);
  if (!connection.why_not.empty()) return connection.why_not;
  const int sockets = static_cast<int>(connection.peers.begin()->second.data.size());
  auto nodes = std::make_unique<Nodes>(Nodes{group.layout, facts.rank, facts.global_ranks});
  const Connection::Host host = host_of(segment);
  for (auto& [rank, peer] : connection.peers) nodes->links.add(rank, std::move(peer), host);
  facts.statistics->start_nodes(group.layout, sockets);
  state.set_nodes(std::move(nodes));
  return "";
}

}  // namespace

void connect_transports(const GroupFacts& facts,
                        GroupState& state,
                        const Meeting& meeting,
                        const WaitContext& wait,
                        Store& store) {
  Transports& found = state.connecting();
  std::vector<PeerInfo> peers;
  for (const std::string& words : meeting.words) peers.push_back(PeerInfo::parse(words));
  const TransportChoice choice = choose_transport(peers, facts.global_ranks);
  found.why_none = choice.why_not;
  found.why_no_messages = kShmTransport.why_not(peers, facts.global_ranks);
  if (choice.transport == nullptr) return;

  const NodeLayout layout = NodeLayout::of(peers);
  const int node = layout.node_of[facts.rank];
  std::vector<PeerInfo> local_peers;
  std::vector<int64_t> local_ranks;
  for (const int rank : layout.ranks[node]) {
    local_peers.push_back(peers[rank]);
    local_ranks.push_back(facts.global_ranks[rank]);
  }
  found.fixed_chunk_bytes = peers[0].fixed_chunk_bytes;
  const bool differs = std::any_of(peers.begin(), peers.end(), [&](const PeerInfo& peer) {
    return peer.fixed_chunk_bytes != found.fixed_chunk_bytes;
  });
  if (differs && facts.rank == 0) {
    log(LogLevel::kWarning,
        "group " + facts.name + ": ranks differ in DEEPYTORCH_CHUNK_BYTES; rank " +
            std::to_string(facts.global_ranks[0]) + "'s is used");
  }
  size_t max_chunk_bytes = Segment::kMaxChunkBytes;
  for (const PeerInfo& peer : peers) {
    max_chunk_bytes = std::min(max_chunk_bytes, peer.max_chunk_bytes);
  }
  Fabric& fabric = Fabric::instance();
  const std::string key = "deepytorch/" + meeting.id;
  ShmConnection connection = connect_shm({store,
                                          key + "/node/" + std::to_string(node),
                                          layout.local_of[facts.rank],
                                          local_ranks,
                                          local_peers,
                                          max_chunk_bytes,
                                          fabric.memory(),
                                          fabric.peer_pools()},
                                         wait);
  found.why_none = connection.why_not;
  if (layout.num_nodes() > 1) {
    // The first bad one of the nodes' verdicts counts for all.
    const std::string mine = found.why_none.empty() ? "ok" : found.why_none;
    for (const std::string& verdict :
         all_gather(store, key + "/nodes", facts.rank, facts.global_ranks, mine, wait)) {
      if (verdict != "ok" && found.why_none.empty()) found.why_none = verdict;
    }
    const bool same_host = std::all_of(peers.begin(), peers.end(), [&](const PeerInfo& peer) {
      return peer.boot_id == peers[0].boot_id && peer.network == peers[0].network;
    });
    found.nodes_key = key;
    found.nodes_share_host = same_host;
    if (found.why_none.empty()) {
      found.why_none = connect_nodes(
          facts,
          state,
          {store, key, facts.rank, facts.global_ranks, layout, same_host, TcpSettings::from_env()},
          *connection.segment,
          wait);
    }
  }
  if (!found.why_none.empty()) {
    found.why_no_messages = found.why_none;
    log(LogLevel::kWarning, "group " + facts.name + " uses the stock backend: " + found.why_none);
    return;
  }
  found.cores_here = fabric.cores_together(local_peers);
  found.oversubscribed = static_cast<int>(local_peers.size()) > found.cores_here;
  fabric.attach(&connection, local_peers);
  found.arrivals = facts.statistics->start_arrivals(local_ranks);
  state.set_segment(std::move(connection.segment));
  if (found.nodes) wake_delegate(facts.delegate, wait);
}

}  // namespace dpt
