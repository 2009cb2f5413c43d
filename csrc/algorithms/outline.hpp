// Outlines of the phases of an algorithm between nodes, in words for people.
//
// Each algorithm says it in its own file, from the functions that it runs by.
#pragma once

#include <string>
#include <vector>

#include "base/algorithm_name.hpp"
#include "base/types.hpp"
#include "transport/node_layout.hpp"

namespace dpt {

// An operation between nodes as it was run.
struct NodeRun {
  AlgorithmName algorithm;
  Collective collective;
  DataType dtype;
  int root;
  size_t count;  // elements of one buffer, the same on every rank
  size_t chunk_bytes;
  size_t bytes() const { return count * size_of(dtype); }
};

struct Phase {
  const char* where;  // kWithin or kBetween
  std::string what;
  size_t bytes;  // that a rank has in hand at a time
};
inline constexpr char kWithin[] = "within nodes";
inline constexpr char kBetween[] = "between nodes";

struct Outline {
  const char* way;                      // from node to node: "direct", "ring" or "chain"
  std::vector<std::vector<int>> rails;  // the ranks that exchange with each other
  size_t pieces;                        // one after another, of at most so many bytes each
  size_t piece_bytes;
  size_t under_way;   // pieces between nodes while the node works on the next ones
  size_t sent_bytes;  // by the node that sends the most
  std::vector<Phase> phases;
};

// Rank i of every node, for the ranks that every node has.
std::vector<std::vector<int>> rails_of(const NodeLayout& layout);
// The same where nodes have equally many ranks, else every two partners: see NOTE [Partners].
std::vector<std::vector<int>> partners_of(const NodeLayout& layout);

// Whether any node has several ranks.
bool shares_nodes(const NodeLayout& layout);

// Empty for what runs within nodes alone, or by the delegate.
std::vector<Outline> outline(const NodeRun& run, const NodeLayout& layout);

}  // namespace dpt
