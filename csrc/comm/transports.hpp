// The native transports of a group, as its ranks found them when they met. They are shared memory
// within a node and the network between nodes, or none and the reason.
//
// Locks: the group's state has it, and says which lock guards what (comm/group_state.hpp).
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "algorithms/nodes.hpp"
#include "transport/shm/segment.hpp"

namespace dpt {

struct Transports {
  int num_nodes() const { return nodes ? nodes->num_nodes() : 1; }
  // How a rank waits in an operation of this size; `in_caller`: in the thread that asked for it.
  WaitStyle wait_style(size_t bytes, bool in_caller) const;

  std::unique_ptr<Segment> segment;  // of this node's ranks
  std::unique_ptr<Nodes> nodes;      // of a group that spans nodes; ends before the segment
  std::string why_none;              // why the group has no native transport; empty if it has
  std::string why_no_messages;       // the same for sends and receives
  int cores_here = 1;                // of this node's ranks together
  bool oversubscribed = false;       // they outnumber those
  size_t fixed_chunk_bytes = 0;      // what rank 0's user wants; 0: nothing
  Arrivals* arrivals = nullptr;      // of the group's statistics
  std::string nodes_key;             // before the keys of their connections in the store
  bool nodes_share_host = false;     // they are emulated
};

}  // namespace dpt
