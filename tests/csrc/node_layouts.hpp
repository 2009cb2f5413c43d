// Layouts of ranks over nodes.
#pragma once

#include <vector>

#include "transport/node_layout.hpp"

namespace dpt::testing {

// Nodes of so many ranks each, which are numbered node by node.
inline NodeLayout nodes_of(const std::vector<int>& sizes) {
  NodeLayout layout;
  for (const int size : sizes) {
    layout.ranks.emplace_back();
    for (int local = 0; local < size; ++local) {
      layout.ranks.back().push_back(layout.size());
      layout.node_of.push_back(static_cast<int>(layout.ranks.size()) - 1);
      layout.local_of.push_back(local);
    }
  }
  return layout;
}

}  // namespace dpt::testing
