// Parts that algorithms for groups that span nodes share: the meeting of the nodes, reductions in
// two levels, and traffic that ends with the operation.
//
// In such a group the segment holds the ranks of this node, and context.me() is a rank's place
// among them; ranks in the group are said in full: `nodes.rank`, `operation.root`.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "transport/node_layout.hpp"
#include "transport/tcp/links.hpp"

namespace dpt {

struct Nodes {
  NodeLayout layout;
  int rank;  // this one's in the group
  std::vector<int64_t> global_ranks;
  Links links = {};
  // Memory for what is under way between nodes; grows to what operations need and stays.
  std::vector<char> scratch = {};

  int node() const { return layout.node_of[rank]; }
  int num_nodes() const { return layout.num_nodes(); }
};

// Messages of one operation. Declared after the memory they use: when the operation fails, what is
// under way is given up before that memory goes away.
class Traffic {
 public:
  Traffic(const RunContext& context, Links::Mover mover)
      : context_(context), links_(context.nodes->links), mover_(mover) {}
  ~Traffic() {
    if (std::uncaught_exceptions() > exceptions_) links_.cancel();
  }
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;

  // A message under way.
  struct Ticket {
    Connection* connection = nullptr;
    uint64_t number = 0;
  };
  Ticket send(int rank, const void* data, size_t bytes) {
    Connection& connection = links_.to(rank);
    return {&connection, connection.send(data, bytes, mover_)};
  }
  Ticket receive(int rank, void* data, size_t capacity) {
    Connection& connection = links_.to(rank);
    return {&connection, connection.receive(data, capacity, mover_)};
  }
  void wait_sent(const Ticket& ticket) const {
    const Elsewhere here(context_.segment);
    ticket.connection->wait_sent(ticket.number, context_.wait);
  }
  // Returns the message's bytes.
  size_t wait_received(const Ticket& ticket) const {
    const Elsewhere here(context_.segment);
    return ticket.connection->wait_received(ticket.number, context_.wait);
  }

 private:
  // While it lives this rank's neighbours know that it waits for another node.
  class Elsewhere {
   public:
    explicit Elsewhere(Segment& segment) : segment_(segment) { segment_.set_waits_elsewhere(true); }
    ~Elsewhere() { segment_.set_waits_elsewhere(false); }
    Elsewhere(const Elsewhere&) = delete;
    Elsewhere& operator=(const Elsewhere&) = delete;

   private:
    Segment& segment_;
  };

  const RunContext& context_;
  const Links& links_;
  Links::Mover mover_;
  int exceptions_ = std::uncaught_exceptions();
};

// Most bytes that a node says at the meeting.
constexpr size_t kMostNodeWords = 64 << 10;

// The first rank of each node, its leader, does this at the meeting.
struct LeaderPart {
  // This node's words, at most kMostNodeWords; called when all ranks of the node have come.
  std::function<std::vector<char>()> words = {};
  // Takes every node's words; what it writes to the segment is seen by all ranks of the node when
  // they leave the meeting.
  std::function<void(const std::vector<std::string_view>& words)> publish = {};
};

// First steps of every operation between nodes:
//   1. every rank publishes its header, as in `enter`; a barrier of the node
//   2. the leaders exchange the headers and their nodes' words
//   3. a barrier of the node
// Throws Error(DPT_ERR_MISMATCH), on every rank alike, when they entered different operations.
// Publishes where the first input and output lie, for the collectives that have one of each.
void enter_nodes(const RunContext& context, const LeaderPart& leader = {});

// A reduction in two levels: of the ranks of a node, then of the nodes' partial results, each in
// order. 16-bit floats are added in fp32 and rounded once per level. Their average is one of
// averages, so that it stays in range wherever the values do.
//
// `sources`: one per local rank.
void reduce_on_node(const RunContext& context,
                    const std::vector<const void*>& sources,
                    size_t count,
                    void* destination);
// `sources`: one per node.
void reduce_nodes(const RunContext& context,
                  const std::vector<const void*>& sources,
                  size_t count,
                  const std::vector<void*>& destinations);

// Adds up some nodes' partial results, which stay partial.
void add_nodes(const RunContext& context,
               const std::vector<const void*>& sources,
               size_t count,
               void* destination);

// Chunks between nodes that are under way while the node works on the next ones.
size_t chunks_under_way(size_t chunk_bytes, size_t num_chunks);

}  // namespace dpt
