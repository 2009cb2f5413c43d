// Hierarchical all_reduce and reduce between nodes: each node adds up by shared memory. Only the
// nodes' sums cross the network, a share on each rail.
//
// The message is cut into chunks, a chunk into one share per rail. In step t every rank
//   1. copies chunk t into its slot, except its own share
//   2. adds up its share of chunk t-1 from all local ranks and sends the sum off. With two
//      nodes the other one gets the sum. With more, each one gets its block of the sum
//   3. for the chunk that was sent some steps ago: takes what came and adds up the nodes' parts in
//      order. With two nodes that is the result; with more it is this node's block, which goes to
//      all, and the result is there as many steps later. The result goes to the common buffer and
//      to the output
//   4. copies the other ranks' shares of the chunk after that to its output
//
// Above eight nodes an all_reduce goes round a ring instead of 2 and 3, so that each node talks to
// its two neighbours alone. In N-1 steps a block gathers the nodes' sums on its way. In N-1 more
// steps the block's result goes round. 16-bit floats would be rounded at every node, so they stay
// direct.
//
// All of it takes one barrier a step, so that the network and the shared memory work at the same
// time. Bytes on each node's link: 2(N-1)/N of the message. In a reduce the last exchange goes to
// the root's node alone.
//
// Registered inputs are read where they lie, as in pipelined_all_reduce.cpp.
#include <algorithm>
#include <vector>

#include "algorithms/nodes.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

constexpr int kFewNodes = 8;

bool goes_round(Collective collective, int num_nodes, size_t element_bytes) {
  return collective == DPT_ALL_REDUCE && num_nodes > kFewNodes && element_bytes != 2;
}

class NodePipeline {
 public:
  explicit NodePipeline(const RunContext& context) : context_(context) {}

  void run() {
    enter_nodes(context_);
    for (int rank = 0; rank < context_.size(); ++rank) {
      inputs_.push_back(rank == context_.me() ? input_ : context_.reach_input(rank, 0));
    }
    publishes_ = context_.size() > 1 && layout_.node_of[root_or_me()] == nodes_.node();
    const bool copies_in =
        context_.size() > 1 && !segment_.offset_of(input_, operation_.bytes()).has_value();
    place_buffers();
    Traffic traffic(context_, Links::Mover::kReactor);
    traffic_ = &traffic;

    const size_t chunks = chunks_.num_chunks;
    const size_t sum_at = 1;
    const size_t reduced_at = sum_at + under_way_;
    const size_t result_at =
        ring_ ? sum_at + num_hops() : reduced_at + (two_nodes() ? 0 : under_way_);
    const size_t last_step = chunks - 1 + result_at + (publishes_ ? 1 : 0);
    const auto chunk_at = [&](size_t step, size_t delay) {
      return step >= delay && step - delay < chunks;
    };
    for (size_t step = 0; step <= last_step; ++step) {
      if (copies_in && chunk_at(step, 0)) copy_in(step);
      if (on_rail() && chunk_at(step, sum_at)) send_sum(step - sum_at);
      for (size_t hop = 1; ring_ && on_rail() && hop <= num_hops(); ++hop) {
        if (chunk_at(step, sum_at + hop)) go_round(step - sum_at - hop, hop);
      }
      const bool direct = !ring_ && on_rail();
      if (direct && chunk_at(step, reduced_at)) reduce_block(step - reduced_at);
      if (direct && !two_nodes() && chunk_at(step, result_at)) take_blocks(step - result_at);
      if (publishes_ && receives() && chunk_at(step, result_at + 1)) {
        copy_out(step - result_at - 1);
      }
      if (context_.size() > 1 && step < last_step) context_.barrier();
    }
    for (const Window& window : windows_) wait_sent(window);
    // Peers may still read this rank's input, or copy out of the result, whose copies alternate.
    if (context_.size() > 1) context_.barrier();
    segment_.next_step += chunks + result_at;
  }

 private:
  // Memory of one chunk under way, and its messages.
  struct Window {
    char* sum = nullptr;     // this node's
    char* theirs = nullptr;  // the other node's, or the other nodes' of this node's block
    char* result = nullptr;  // with more than two nodes: of all blocks
    std::vector<Traffic::Ticket> sent = {};
    std::vector<Traffic::Ticket> sums = {};    // to come, by node
    std::vector<Traffic::Ticket> blocks = {};  // to come, by node
  };

  bool two_nodes() const { return layout_.num_nodes() == 2; }
  bool on_rail() const { return context_.me() < rails_; }
  bool rooted() const { return operation_.collective == DPT_REDUCE; }
  int root_or_me() const { return rooted() ? operation_.root : nodes_.rank; }
  bool receives() const { return root_or_me() == nodes_.rank; }
  bool node_receives(int node) const {
    return !rooted() || layout_.node_of[operation_.root] == node;
  }
  size_t num_hops() const { return 2 * (layout_.num_nodes() - 1); }
  int rail_on(int node) const { return layout_.ranks[node][context_.me()]; }

  void place_buffers() {
    if (!on_rail()) return;
    windows_.resize(ring_ ? num_hops() + 1 : (two_nodes() ? 1 : 2) * under_way_ + 1);
    const size_t share = round_up(
        share_of(chunks_.elements, element_bytes_, 0, rails_).count() * element_bytes_, kCacheLine);
    const size_t block =
        round_up(share_of(share / element_bytes_, element_bytes_, 0, layout_.num_nodes()).count() *
                     element_bytes_,
                 kCacheLine);
    const size_t theirs = two_nodes() ? share : block * layout_.num_nodes();
    const size_t each = share + theirs + (two_nodes() ? 0 : share);
    if (nodes_.scratch.size() < each * windows_.size() + kCacheLine) {
      nodes_.scratch.resize(each * windows_.size() + kCacheLine);
    }
    char* next = nodes_.scratch.data();
    for (Window& window : windows_) {
      window.sum = next;
      window.theirs = next + share;
      window.result = two_nodes() ? window.sum : next + share + theirs;
      next += each;
    }
    block_bytes_ = block;
  }

  int parity(size_t step) const { return (segment_.next_step + step) & 1; }
  size_t begin(size_t chunk) const { return chunk * chunks_.elements; }
  size_t length(size_t chunk) const {
    return std::min(chunks_.elements, operation_.count - begin(chunk));
  }
  Share share(size_t chunk) const {
    if (!on_rail()) return {0, 0};
    return share_of(length(chunk), element_bytes_, context_.me(), rails_);
  }
  // A node's part of this rank's share.
  Share block(size_t chunk, int node) const {
    return share_of(share(chunk).count(), element_bytes_, node, layout_.num_nodes());
  }
  Window& window(size_t chunk) { return windows_[chunk % windows_.size()]; }

  void copy_around_share(char* to, const char* from, size_t chunk) const {
    const Share own = share(chunk);
    const size_t after = own.end * element_bytes_;
    copy(to, from, own.begin * element_bytes_);
    copy(to + after, from + after, (length(chunk) - own.end) * element_bytes_);
  }

  void copy_in(size_t chunk) const {
    copy_around_share(
        segment_.slot(context_.me(), parity(chunk)), input_ + begin(chunk) * element_bytes_, chunk);
  }

  void send_sum(size_t chunk) {
    Window& at = window(chunk);
    wait_sent(at);
    at.sent.clear();
    const Share own = share(chunk);
    const size_t offset = own.begin * element_bytes_;
    std::vector<const void*> sources;
    for (int rank = 0; rank < context_.size(); ++rank) {
      sources.push_back(inputs_[rank] != nullptr
                            ? inputs_[rank] + begin(chunk) * element_bytes_ + offset
                            : segment_.slot(rank, parity(chunk)) + offset);
    }
    reduce_on_node(context_, sources, own.count(), at.sum);
    if (ring_) return pass_on(chunk, 0);
    at.sums.assign(layout_.num_nodes(), {});
    for (const int node : layout_.others(nodes_.node())) {
      const Share theirs = two_nodes() ? Share{0, own.count()} : block(chunk, node);
      const Share mine = two_nodes() ? Share{0, own.count()} : block(chunk, nodes_.node());
      if (!two_nodes() || node_receives(nodes_.node())) {
        at.sums[node] =
            traffic_->receive(rail_on(node), their_place(at, node), mine.count() * element_bytes_);
      }
      if (!two_nodes() || node_receives(node)) {
        at.sent.push_back(traffic_->send(rail_on(node),
                                         at.sum + theirs.begin * element_bytes_,
                                         theirs.count() * element_bytes_));
      }
    }
  }

  char* their_place(const Window& at, int node) const {
    return two_nodes() ? at.theirs : at.theirs + node * block_bytes_;
  }

  void reduce_block(size_t chunk) {
    if (two_nodes() && !node_receives(nodes_.node())) return;
    Window& at = window(chunk);
    const Share mine = two_nodes() ? Share{0, share(chunk).count()} : block(chunk, nodes_.node());
    std::vector<const void*> sources;
    for (int node = 0; node < layout_.num_nodes(); ++node) {
      if (node == nodes_.node()) {
        sources.push_back(at.sum + mine.begin * element_bytes_);
        continue;
      }
      traffic_->wait_received(at.sums[node]);
      sources.push_back(their_place(at, node));
    }
    if (two_nodes()) {
      reduce_nodes(context_, sources, mine.count(), places_of_result(chunk));
      return;
    }
    char* result = at.result + mine.begin * element_bytes_;
    reduce_nodes(context_, sources, mine.count(), {result});
    at.blocks.assign(layout_.num_nodes(), {});
    for (const int node : layout_.others(nodes_.node())) {
      if (node_receives(nodes_.node())) {
        const Share theirs = block(chunk, node);
        at.blocks[node] = traffic_->receive(rail_on(node),
                                            at.result + theirs.begin * element_bytes_,
                                            theirs.count() * element_bytes_);
      }
      if (node_receives(node)) {
        at.sent.push_back(traffic_->send(rail_on(node), result, mine.count() * element_bytes_));
      }
    }
  }

  // The node that lies `steps` before this one on the ring.
  int node_before(size_t steps) const {
    const auto nodes = static_cast<size_t>(layout_.num_nodes());
    return static_cast<int>((nodes_.node() + 2 * nodes - steps % nodes) % nodes);
  }
  // The node whose block comes in at a hop, 0: that this one sends first. The first N-1 hops gather
  // sums, so that the block of the node after this one is complete here; the others bring results.
  int block_at(size_t hop) const {
    const auto nodes = static_cast<size_t>(layout_.num_nodes());
    return hop < nodes ? node_before(hop) : node_before(hop - nodes);
  }
  bool gathers(size_t hop) const { return hop < static_cast<size_t>(layout_.num_nodes()); }
  char* ring_place(const Window& at, size_t hop, size_t chunk) const {
    const int node = block_at(hop);
    if (gathers(hop)) return their_place(at, node);
    return at.result + block(chunk, node).begin * element_bytes_;
  }

  // Takes what the node before sent at this hop, and sends the block on.
  void go_round(size_t chunk, size_t hop) {
    Window& at = window(chunk);
    const Share part = block(chunk, block_at(hop));
    traffic_->wait_received(at.sums[0]);
    if (gathers(hop)) {
      const std::vector<const void*> sources = {ring_place(at, hop, chunk),
                                                at.sum + part.begin * element_bytes_};
      if (gathers(hop + 1)) {
        add_nodes(context_, sources, part.count(), at.sum + part.begin * element_bytes_);
      } else {
        reduce_nodes(context_, sources, part.count(), {at.result + part.begin * element_bytes_});
      }
    }
    if (hop < num_hops()) return pass_on(chunk, hop);
    for (void* place : places_of_result(chunk)) {
      copy(place, at.result, share(chunk).count() * element_bytes_);
    }
  }

  // Sends the block of this hop to the node after, and asks the node before for the next one.
  void pass_on(size_t chunk, size_t hop) {
    Window& at = window(chunk);
    const Share part = block(chunk, block_at(hop));
    const bool is_result = !gathers(hop + 1);
    const char* from = is_result ? at.result : at.sum;
    at.sums.resize(1);
    at.sums[0] = traffic_->receive(rail_on(node_before(1)),
                                   ring_place(at, hop + 1, chunk),
                                   block(chunk, block_at(hop + 1)).count() * element_bytes_);
    at.sent.push_back(traffic_->send(rail_on(node_before(layout_.num_nodes() - 1)),
                                     from + part.begin * element_bytes_,
                                     part.count() * element_bytes_));
  }

  void take_blocks(size_t chunk) {
    if (!node_receives(nodes_.node())) return;
    Window& at = window(chunk);
    for (int node = 0; node < layout_.num_nodes(); ++node) {
      if (node != nodes_.node()) traffic_->wait_received(at.blocks[node]);
    }
    for (void* place : places_of_result(chunk)) {
      copy(place, at.result, share(chunk).count() * element_bytes_);
    }
  }

  // This rank's share of the result goes to these places. One may be a common buffer, of which
  // there are two: as with slots, a rank that is one barrier ahead writes the other one.
  std::vector<void*> places_of_result(size_t chunk) const {
    std::vector<void*> places;
    const size_t offset = share(chunk).begin * element_bytes_;
    if (publishes_) places.push_back(segment_.result(parity(chunk)) + offset);
    if (receives()) places.push_back(output_ + begin(chunk) * element_bytes_ + offset);
    return places;
  }

  void copy_out(size_t chunk) const {
    copy_around_share(
        output_ + begin(chunk) * element_bytes_, segment_.result(parity(chunk)), chunk);
  }

  void wait_sent(const Window& at) const {
    for (const Traffic::Ticket& ticket : at.sent) traffic_->wait_sent(ticket);
  }

  const RunContext& context_;
  Segment& segment_ = context_.segment;
  const Operation& operation_ = context_.operation;
  Nodes& nodes_ = *context_.nodes;
  const NodeLayout& layout_ = nodes_.layout;
  const int rails_ = layout_.num_rails();
  const size_t element_bytes_ = size_of(operation_.dtype);
  const char* const input_ = static_cast<const char*>(operation_.inputs[0]);
  char* const output_ = static_cast<char*>(operation_.outputs[0]);
  const Chunks chunks_ = split_chunks(operation_.count, element_bytes_, context_.plan.chunk_bytes);
  const size_t under_way_ = chunks_under_way(context_.plan.chunk_bytes, chunks_.num_chunks);
  const bool ring_ = goes_round(operation_.collective, layout_.num_nodes(), element_bytes_);
  bool publishes_ = false;           // the result goes through the common buffer
  std::vector<const char*> inputs_;  // by local rank; nullptr: in the rank's slot
  size_t block_bytes_ = 0;
  std::vector<Window> windows_;
  Traffic* traffic_ = nullptr;
};

void run_node_pipeline(const RunContext& context) { NodePipeline(context).run(); }

// The number of elements that a node sends for a share of `count` elements.
size_t sent_elements(const NodeRun& run, const NodeLayout& layout, int node, size_t count) {
  const size_t element_bytes = size_of(run.dtype);
  const int nodes = layout.num_nodes();
  const auto block = [&](int of) {
    return share_of(count, element_bytes, of % nodes, nodes).count();
  };
  const int receiver = run.collective == DPT_REDUCE ? layout.node_of[run.root] : -1;
  // The first hops leave out the block of the node after this one, the others the one after that.
  if (goes_round(run.collective, nodes, element_bytes)) {
    return 2 * count - block(node + 1) - block(node + 2);
  }
  if (nodes == 2) return receiver == node ? 0 : count;
  const int takers = receiver < 0 ? nodes - 1 : (receiver == node ? 0 : 1);
  return count - block(node) + takers * block(node);
}

size_t most_sent_bytes(const NodeRun& run, const NodeLayout& layout, const Chunks& chunks) {
  const size_t element_bytes = size_of(run.dtype);
  const size_t last = run.count - (chunks.num_chunks - 1) * chunks.elements;
  const int rails = layout.num_rails();
  size_t most = 0;
  for (int node = 0; node < layout.num_nodes(); ++node) {
    size_t elements = 0;
    for (int rail = 0; rail < rails; ++rail) {
      const size_t full = share_of(chunks.elements, element_bytes, rail, rails).count();
      const size_t rest = share_of(last, element_bytes, rail, rails).count();
      elements += (chunks.num_chunks - 1) * sent_elements(run, layout, node, full) +
                  sent_elements(run, layout, node, rest);
    }
    most = std::max(most, elements * element_bytes);
  }
  return most;
}

Phase exchange_of_sums(const NodeRun& run, const NodeLayout& layout, size_t share_elements) {
  const bool rooted = run.collective == DPT_REDUCE;
  const size_t element_bytes = size_of(run.dtype);
  const int nodes = layout.num_nodes();
  const size_t block = share_of(share_elements, element_bytes, 0, nodes).count() * element_bytes;
  const std::string hops = std::to_string(nodes - 1);
  if (goes_round(run.collective, nodes, element_bytes)) {
    return {kBetween,
            "on every rail the share goes round the nodes in blocks, one for each node: " + hops +
                " hops gather the nodes' sums, " + hops + " more bring the results round",
            block};
  }
  if (nodes == 2) {
    return {kBetween,
            rooted ? "on every rail the share's sum goes to the root's node, where the nodes' sums "
                     "are added up"
                   : "on every rail the two ranks send each other their sums of the share, and "
                     "each adds them up",
            share_elements * element_bytes};
  }
  return {kBetween,
          std::string("on every rail each rank sends every other node's block of the share to that "
                      "node, adds up what comes for its own block, and sends the result to ") +
              (rooted ? "the root's node" : "all others"),
          block};
}

Outline outline_node_pipeline(const NodeRun& run, const NodeLayout& layout) {
  const size_t element_bytes = size_of(run.dtype);
  const Chunks chunks = split_chunks(run.count, element_bytes, run.chunk_bytes);
  const int rails = layout.num_rails();
  const size_t share = share_of(chunks.elements, element_bytes, 0, rails).count();
  const bool ring = goes_round(run.collective, layout.num_nodes(), element_bytes);
  Outline outline{ring ? "ring" : "direct",
                  rails_of(layout),
                  chunks.num_chunks,
                  chunks.elements * element_bytes,
                  chunks_under_way(run.chunk_bytes, chunks.num_chunks),
                  most_sent_bytes(run, layout, chunks),
                  {}};
  if (shares_nodes(layout)) {
    outline.phases.push_back(
        {kWithin,
         "by shared memory each rank on a rail adds up its share of a chunk, one of " +
             std::to_string(rails) + ", over its node's ranks",
         share * element_bytes});
  }
  outline.phases.push_back(exchange_of_sums(run, layout, share));
  if (shares_nodes(layout)) {
    const bool rooted = run.collective == DPT_REDUCE;
    outline.phases.push_back({kWithin,
                              std::string("the shares' results come together in shared memory, "
                                          "where ") +
                                  (rooted ? "the root copies" : "all ranks copy") + " them out",
                              chunks.elements * element_bytes});
  }
  return outline;
}

}  // namespace

const Algorithm kHierarchicalAllReduce{
    AlgorithmName::kHierarchical, DPT_ALL_REDUCE, run_node_pipeline, outline_node_pipeline};
const Algorithm kHierarchicalReduce{
    AlgorithmName::kHierarchical, DPT_REDUCE, run_node_pipeline, outline_node_pipeline};

}  // namespace dpt
