// Lays out which ranks of a group share a node, and who speaks for whom between nodes.
//
// NOTE [Partners] Every rank has one partner on each other node: the rank there with its own local
// rank. That number is counted round where the node has fewer ranks. A node tells a rank anything
// through that rank's partner. With equally many ranks per node these pairs are the rails: rank i
// of one node and rank i of every other.
#pragma once

#include <algorithm>
#include <vector>

#include "bootstrap/exchange.hpp"

namespace dpt {

struct NodeLayout {
  std::vector<std::vector<int>> ranks;  // of each node, ascending; nodes by their first rank
  std::vector<int> node_of;             // by rank
  std::vector<int> local_of;            // by rank: its place on its node

  static NodeLayout of(const std::vector<PeerInfo>& peers) {
    NodeLayout layout;
    std::vector<std::string> names;
    for (size_t rank = 0; rank < peers.size(); ++rank) {
      const auto found = std::find(names.begin(), names.end(), peers[rank].node);
      const size_t node = found - names.begin();
      if (found == names.end()) {
        names.push_back(peers[rank].node);
        layout.ranks.emplace_back();
      }
      layout.node_of.push_back(static_cast<int>(node));
      layout.local_of.push_back(static_cast<int>(layout.ranks[node].size()));
      layout.ranks[node].push_back(static_cast<int>(rank));
    }
    return layout;
  }

  static NodeLayout one_node(int num_ranks) {
    NodeLayout layout;
    layout.ranks.emplace_back();
    for (int rank = 0; rank < num_ranks; ++rank) {
      layout.ranks[0].push_back(rank);
      layout.node_of.push_back(0);
      layout.local_of.push_back(rank);
    }
    return layout;
  }

  int num_nodes() const { return static_cast<int>(ranks.size()); }
  int size() const { return static_cast<int>(node_of.size()); }
  int ranks_on(int node) const { return static_cast<int>(ranks[node].size()); }
  // Parallel ways between nodes that every node has.
  int num_rails() const {
    size_t fewest = ranks[0].size();
    for (const auto& each : ranks) fewest = std::min(fewest, each.size());
    return static_cast<int>(fewest);
  }
  // The nodes beside `node`, from the one after it on: who sends in this order does not send where
  // all others do, too.
  std::vector<int> others(int node) const {
    std::vector<int> found;
    for (int distance = 1; distance < num_nodes(); ++distance) {
      found.push_back((node + distance) % num_nodes());
    }
    return found;
  }
  // See NOTE [Partners].
  int partner(int rank, int node) const {
    return node == node_of[rank] ? rank : ranks[node][local_of[rank] % ranks_on(node)];
  }
  // Whether one of them is the other's partner.
  bool linked(int a, int b) const {
    return node_of[a] != node_of[b] && (partner(a, node_of[b]) == b || partner(b, node_of[a]) == a);
  }
};

}  // namespace dpt
