#include "transport/tcp/tcp_transport.hpp"

#include <sstream>

#include "base/error.hpp"

namespace dpt {
namespace {

// Connecting everything must not cost the whole operation timeout.
constexpr std::chrono::milliseconds kLimit{30000};
constexpr char kOk[] = "ok";

std::string why_not_tcp(const std::vector<PeerInfo>& peers,
                        const std::vector<int64_t>& global_ranks) {
  const NodeLayout layout = NodeLayout::of(peers);
  if (layout.num_nodes() == 1) return "TCP is for groups of several nodes";
  for (const std::vector<int>& ranks : layout.ranks) {
    std::vector<PeerInfo> local;
    std::vector<int64_t> names;
    for (const int rank : ranks) {
      local.push_back(peers[rank]);
      names.push_back(global_ranks[rank]);
    }
    const std::string reason = kShmTransport.why_not(local, names);
    if (!reason.empty()) return reason;
  }
  return "";
}

std::string to_hex(const std::string& bytes) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text += digits[static_cast<unsigned char>(byte) >> 4];
    text += digits[byte & 15];
  }
  return text;
}

// Flows between two nodes are what matters: enough to get past a limit on each, not so many that
// they get in each other's way.
int usual_sockets(const NodeLayout& layout) {
  constexpr int kFlows = 8;
  constexpr int kFewNodes = 8;
  if (layout.num_nodes() > kFewNodes) return 2;
  return std::clamp((kFlows + layout.num_rails() - 1) / layout.num_rails(), 2, kFlows);
}

// The steps of one rank until its connections stand; every step that can fail on one rank alone is
// told to all, so that all of them go on or none.
class Joining {
 public:
  Joining(const TcpGroup& group, const WaitContext& wait) : group_(group), wait_(wait) {}

  TcpConnection run() {
    TcpConnection connection;
    std::map<int, std::vector<UniqueFd>> sockets;
    const bool ok = together("interfaces", [&] { return offer(); }) &&
                    together("endpoints", [&] { return open(); }) && together("connected", [&] {
                      sockets = connect();
                      return std::string();
                    });
    if (!ok) {
      connection.why_not = why_not_;
      return connection;
    }
    for (auto& [rank, fds] : sockets) {
      Connection::Peer peer{name_of(rank), std::move(fds), {}};
      peer.control = std::move(peer.data.back());
      peer.data.pop_back();
      peer.checksum = group_.settings.checksum;
      connection.peers.emplace(rank, std::move(peer));
    }
    return connection;
  }

 private:
  // Runs `step` and gives every rank's words to `words_`; false when it failed on any.
  template <typename Step>
  bool together(const char* name, const Step& step) {
    std::string mine;
    try {
      mine = std::string(kOk) + " " + step();
    } catch (const Error& error) {
      if (error.status() != DPT_ERR_SYSTEM && error.status() != DPT_ERR_INVALID) throw;
      mine = error.what();
      group_.store.set(failed_key(), mine);
    }
    words_ = all_gather(
        group_.store, group_.key + "/tcp/" + name, group_.rank, group_.global_ranks, mine, wait_);
    for (size_t rank = 0; rank < words_.size(); ++rank) {
      if (words_[rank].starts_with(kOk)) {
        words_[rank].erase(0, sizeof kOk);
        continue;
      }
      // A rank that only heard of another's failure says no more than that one.
      if (words_[rank] != kHeard || why_not_.empty()) {
        why_not_ = "rank " + std::to_string(group_.global_ranks[rank]) +
                   " has no connection to other nodes: " + words_[rank];
      }
      if (words_[rank] != kHeard) return false;
    }
    return why_not_.empty();
  }

  std::string failed_key() const { return group_.key + "/tcp/failed"; }

  // The own interfaces; rank 0 adds what all go by.
  std::string offer() {
    interfaces_ = list_interfaces();
    if (!group_.settings.ifnames.empty()) {
      interfaces_ = select_interfaces(interfaces_, group_.settings.ifnames);
    }
    std::string common = "- 0";
    if (group_.rank == 0) {
      const int wanted = group_.settings.num_sockets;
      common = to_hex(random_secret()) + " " +
               std::to_string(wanted != 0 ? wanted : usual_sockets(group_.layout));
    }
    return common + " " + serialize(interfaces_);
  }

  // Listens where the others can reach this rank.
  std::string open() {
    std::vector<std::vector<Interface>> all;
    for (size_t rank = 0; rank < words_.size(); ++rank) {
      std::istringstream in(words_[rank]);
      std::string secret;
      int sockets = 0;
      in >> secret >> sockets;
      if (rank == 0) {
        own_ = {secret,
                group_.key.substr(group_.key.find('/') + 1),
                static_cast<uint32_t>(group_.rank),
                static_cast<uint32_t>(group_.layout.size()),
                static_cast<uint32_t>(sockets + 1)};
      }
      std::string rest;
      std::getline(in, rest);
      all.push_back(parse_interfaces(rest));
    }
    std::vector<std::vector<Interface>> others;
    for (int node = 0; node < group_.layout.num_nodes(); ++node) {
      if (node != my_node()) others.push_back(all[group_.layout.ranks[node][0]]);
    }
    for (const Interface& each : choose(others)) {
      listeners_.push_back(listen_on(each, group_.settings));
    }
    std::string words;
    for (const Listener& each : listeners_) {
      words += (words.empty() ? "" : " ") + each.interface.name + " " + each.interface.ip + " " +
               std::to_string(each.address.port());
    }
    return words;
  }

  std::vector<Interface> choose(const std::vector<std::vector<Interface>>& others) const {
    if (!group_.settings.ifnames.empty()) return interfaces_;
    if (group_.same_host) return {{"lo", "127.0.0.1", 8}};
    if (const auto found = interface_towards(interfaces_, others, source_towards)) return {*found};
    throw Error(DPT_ERR_SYSTEM,
                "no route from here leads to the other nodes. Name the network interface with the "
                "option ifname (DEEPYTORCH_IFNAME)");
  }

  std::map<int, std::vector<UniqueFd>> connect() {
    Dialing dialing{own_, listeners_, {}, {}, group_.settings, [this] { check(); }};
    for (int rank = 0; rank < group_.layout.size(); ++rank) {
      std::istringstream in(words_[rank]);
      std::string interface;
      std::string ip;
      uint16_t port = 0;
      while (in >> interface >> ip >> port) {
        endpoints_[rank].push_back({SocketAddress::parse(ip, port), interface});
      }
      if (!group_.layout.linked(group_.rank, rank)) continue;
      dialing.peers[rank] = endpoints_[rank];
      dialing.names[rank] = "rank " + std::to_string(group_.global_ranks[rank]);
    }
    return dial(dialing, std::min(kLimit, wait_.deadline.timeout()));
  }

  void check() const {
    wait_.check();
    if (const auto failed = group_.store.get(failed_key(), std::chrono::milliseconds(1))) {
      throw Error(DPT_ERR_SYSTEM, kHeard);
    }
  }

  int my_node() const { return group_.layout.node_of[group_.rank]; }

  std::string name_of(int rank) const {
    std::string name = "rank " + std::to_string(group_.global_ranks[rank]) + " (";
    for (const Endpoint& each : endpoints_.at(rank)) {
      name += (&each == endpoints_.at(rank).data() ? "" : ", ") + each.address.describe() + " by " +
              each.interface;
    }
    return name + ")";
  }

  static constexpr char kHeard[] = "another rank could not connect";

  const TcpGroup& group_;
  const WaitContext& wait_;
  std::vector<std::string> words_;  // of the last step, by rank
  std::string why_not_;
  std::vector<Interface> interfaces_;
  std::vector<Listener> listeners_;
  Acquaintance own_;
  std::map<int, std::vector<Endpoint>> endpoints_;
};

}  // namespace

const Transport kTcpTransport{"tcp", why_not_tcp};

TcpConnection connect_tcp(const TcpGroup& group, const WaitContext& wait) {
  return Joining(group, wait).run();
}

}  // namespace dpt
