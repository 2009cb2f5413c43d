// The communicator's way to its ranks, once they have met: shared memory within nodes, the network
// between them.
#include <algorithm>

#include "base/log.hpp"
#include "comm/communicator.hpp"
#include "comm/fabric.hpp"
#include "transport/shm/shm_transport.hpp"

namespace dpt {
namespace {

// All ranks of this node hear of any trouble between nodes.
Connection::Host host_of(Segment& segment) {
  return {
      Fabric::instance().reactor(),
      [&segment](dpt_status status, const std::string& reason) { segment.abort(status, reason); },
      [&segment] { segment.throw_if_aborted(); }};
}

}  // namespace

void Communicator::connect_ranks(const Meeting& meeting, const WaitContext& wait, Store& store) {
  std::vector<PeerInfo> peers;
  for (const std::string& words : meeting.words) peers.push_back(PeerInfo::parse(words));
  const TransportChoice choice = choose_transport(peers, global_ranks_);
  no_transport_ = choice.why_not;
  no_messages_ = kShmTransport.why_not(peers, global_ranks_);
  if (choice.transport == nullptr) return;

  const NodeLayout layout = NodeLayout::of(peers);
  const int node = layout.node_of[rank_];
  std::vector<PeerInfo> local_peers;
  std::vector<int64_t> local_ranks;
  for (const int rank : layout.ranks[node]) {
    local_peers.push_back(peers[rank]);
    local_ranks.push_back(global_ranks_[rank]);
  }
  fixed_chunk_bytes_ = peers[0].fixed_chunk_bytes;
  const bool differs = std::any_of(peers.begin(), peers.end(), [&](const PeerInfo& peer) {
    return peer.fixed_chunk_bytes != fixed_chunk_bytes_;
  });
  if (differs && rank_ == 0) {
    log(LogLevel::kWarning,
        "group " + group_name_ + ": ranks differ in DEEPYTORCH_CHUNK_BYTES; rank " +
            std::to_string(global_ranks_[0]) + "'s is used");
  }
  size_t max_chunk_bytes = Segment::kMaxChunkBytes;
  for (const PeerInfo& peer : peers) {
    max_chunk_bytes = std::min(max_chunk_bytes, peer.max_chunk_bytes);
  }
  Fabric& fabric = Fabric::instance();
  const std::string key = "deepytorch/" + meeting.id;
  ShmConnection connection = connect_shm({store,
                                          key + "/node/" + std::to_string(node),
                                          layout.local_of[rank_],
                                          local_ranks,
                                          local_peers,
                                          max_chunk_bytes,
                                          fabric.memory(),
                                          fabric.peer_pools()},
                                         wait);
  no_transport_ = connection.why_not;
  if (layout.num_nodes() > 1) {
    // The first bad one of the nodes' verdicts counts for all.
    const std::string mine = no_transport_.empty() ? "ok" : no_transport_;
    for (const std::string& verdict :
         all_gather(store, key + "/nodes", rank_, global_ranks_, mine, wait)) {
      if (verdict != "ok" && no_transport_.empty()) no_transport_ = verdict;
    }
    const bool same_host = std::all_of(peers.begin(), peers.end(), [&](const PeerInfo& peer) {
      return peer.boot_id == peers[0].boot_id && peer.network == peers[0].network;
    });
    nodes_key_ = key;
    nodes_share_host_ = same_host;
    if (no_transport_.empty()) {
      no_transport_ = connect_nodes(
          {store, key, rank_, global_ranks_, layout, same_host, TcpSettings::from_env()},
          *connection.segment,
          wait);
    }
  }
  if (!no_transport_.empty()) {
    no_messages_ = no_transport_;
    log(LogLevel::kWarning, "group " + group_name_ + " uses the stock backend: " + no_transport_);
    return;
  }
  cores_here_ = fabric.cores_together(local_peers);
  oversubscribed_ = static_cast<int>(local_peers.size()) > cores_here_;
  fabric.attach(&connection, local_peers);
  arrivals_ = statistics_->start_arrivals(local_ranks);
  {
    std::lock_guard lock(state_mutex_);
    segment_ = std::move(connection.segment);
  }
  if (nodes_) wake_delegate(wait);
  tuning_.agree(*segment_, nodes_.get(), oversubscribed_, wait);
}

void Communicator::wake_delegate(const WaitContext& wait) const {
  if (delegate_.execute == nullptr) return;
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
  if (delegate_.execute(delegate_.context, &request, &error) != DPT_OK) {
    log(LogLevel::kDebug, std::string("the stock backend does not answer: ") + error.message);
  }
}

std::string Communicator::connect_nodes(const TcpGroup& group,
                                        Segment& segment,
                                        const WaitContext& wait) {
  TcpConnection connection = connect_tcp(group, wait);
  if (!connection.why_not.empty()) return connection.why_not;
  const int sockets = static_cast<int>(connection.peers.begin()->second.data.size());
  auto nodes = std::make_unique<Nodes>(Nodes{group.layout, rank_, global_ranks_});
  const Connection::Host host = host_of(segment);
  for (auto& [rank, peer] : connection.peers) nodes->links.add(rank, std::move(peer), host);
  std::lock_guard lock(state_mutex_);
  statistics_->start_nodes(group.layout, sockets);
  nodes_ = std::move(nodes);
  return "";
}

std::shared_ptr<staged::Between> Communicator::connect_between(const WaitContext& wait) {
  TcpConnection connection = connect_tcp({*store_,
                                          nodes_key_ + "/gpus",
                                          rank_,
                                          global_ranks_,
                                          nodes_->layout,
                                          nodes_share_host_,
                                          TcpSettings::from_env()},
                                         wait);
  if (!connection.why_not.empty()) throw Error(DPT_ERR_SYSTEM, connection.why_not);
  auto between = std::make_shared<staged::Between>();
  const Connection::Host host = host_of(*segment_);
  for (auto& [rank, peer] : connection.peers) between->links.add(rank, std::move(peer), host);
  between->on_trouble = host.on_trouble;
  return between;
}

}  // namespace dpt
