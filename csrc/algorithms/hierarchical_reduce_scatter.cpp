// Hierarchical reduce_scatter between nodes. For each rank elsewhere, its partner on a node adds up
// what the node's ranks hold for it. The sum crosses the network once.
//
// Every rank's slot holds one lane per receiving rank. In step t every rank
//   1. copies piece t of its inputs into its lanes, except those that it adds up itself
//   2. adds up piece t-1, over the local ranks, for itself and for those whose partner it is, and
//      sends the latter off
//   3. takes what its partners sent for a piece some steps ago, and adds up the nodes' parts, in
//      order, into its output
//
// There is one barrier a step.
#include <algorithm>
#include <vector>

#include "algorithms/nodes.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

class NodeReduceScatter {
 public:
  explicit NodeReduceScatter(const RunContext& context) : context_(context) {
    for (const int node : layout_.others(nodes_.node())) {
      for (const int rank : layout_.ranks[node]) {
        if (layout_.partner(rank, nodes_.node()) == nodes_.rank) served_.push_back(rank);
      }
    }
  }

  void run() {
    enter_nodes(context_);
    windows_.resize(under_way_ + 1);
    const size_t each = piece_bytes_ * (1 + served_.size() + layout_.num_nodes());
    if (nodes_.scratch.size() < each * windows_.size()) {
      nodes_.scratch.resize(each * windows_.size());
    }
    for (size_t i = 0; i < windows_.size(); ++i) {
      windows_[i].memory = nodes_.scratch.data() + i * each;
    }
    Traffic traffic(context_, Links::Mover::kReactor);
    traffic_ = &traffic;
    const size_t pieces = pieces_.num_chunks;
    for (size_t step = 0; step <= pieces + under_way_; ++step) {
      if (step < pieces) copy_in(step);
      if (step >= 1 && step - 1 < pieces) send_sums(step - 1);
      if (step >= 1 + under_way_) finish(step - 1 - under_way_);
      if (context_.size() > 1 && step < pieces) context_.barrier();
    }
    for (const Window& window : windows_) wait_sent(window);
    segment_.next_step += pieces + 1;
  }

 private:
  // Memory of one piece under way: this node's sum for this rank, those for the ranks it serves,
  // and the other nodes'.
  struct Window {
    char* memory = nullptr;
    std::vector<Traffic::Ticket> sent = {};
    std::vector<Traffic::Ticket> coming = {};  // by node
  };

  int parity(size_t step) const { return (segment_.next_step + step) & 1; }
  size_t begin(size_t piece) const { return piece * pieces_.elements; }
  size_t length(size_t piece) const {
    return std::min(pieces_.elements, operation_.count - begin(piece));
  }
  const char* input(int rank, size_t piece) const {
    return static_cast<const char*>(operation_.inputs[rank]) + begin(piece) * element_bytes_;
  }
  char* lane(int local, int receiver, size_t piece) const {
    return segment_.slot(local, parity(piece)) + receiver * lane_bytes_;
  }
  Window& window(size_t piece) { return windows_[piece % windows_.size()]; }
  char* place_of_node(const Window& at, int node) const {
    return at.memory + piece_bytes_ * (1 + served_.size() + node);
  }

  void copy_in(size_t piece) const {
    for (int rank = 0; rank < layout_.size(); ++rank) {
      if (layout_.partner(rank, nodes_.node()) == nodes_.rank) continue;
      copy(lane(context_.me(), rank, piece), input(rank, piece), length(piece) * element_bytes_);
    }
  }

  void sum_for(int receiver, size_t piece, void* destination) const {
    std::vector<const void*> sources;
    for (int local = 0; local < context_.size(); ++local) {
      sources.push_back(local == context_.me() ? input(receiver, piece)
                                               : lane(local, receiver, piece));
    }
    reduce_on_node(context_, sources, length(piece), destination);
  }

  void send_sums(size_t piece) {
    Window& at = window(piece);
    wait_sent(at);
    at.sent.clear();
    const size_t bytes = length(piece) * element_bytes_;
    at.coming.assign(layout_.num_nodes(), {});
    for (const int node : layout_.others(nodes_.node())) {
      at.coming[node] =
          traffic_->receive(layout_.partner(nodes_.rank, node), place_of_node(at, node), bytes);
    }
    for (size_t i = 0; i < served_.size(); ++i) {
      char* sum = at.memory + piece_bytes_ * (1 + i);
      sum_for(served_[i], piece, sum);
      at.sent.push_back(traffic_->send(served_[i], sum, bytes));
    }
    sum_for(nodes_.rank, piece, at.memory);
  }

  void finish(size_t piece) {
    const Window& at = window(piece);
    std::vector<const void*> sources;
    for (int node = 0; node < layout_.num_nodes(); ++node) {
      if (node == nodes_.node()) {
        sources.push_back(at.memory);
        continue;
      }
      traffic_->wait_received(at.coming[node]);
      sources.push_back(place_of_node(at, node));
    }
    char* output = static_cast<char*>(operation_.outputs[0]) + begin(piece) * element_bytes_;
    reduce_nodes(context_, sources, length(piece), {output});
  }

  void wait_sent(const Window& at) const {
    for (const Traffic::Ticket& ticket : at.sent) traffic_->wait_sent(ticket);
  }

  const RunContext& context_;
  Segment& segment_ = context_.segment;
  const Operation& operation_ = context_.operation;
  Nodes& nodes_ = *context_.nodes;
  const NodeLayout& layout_ = nodes_.layout;
  const size_t element_bytes_ = size_of(operation_.dtype);
  const size_t lane_bytes_ = lane_bytes_of(context_.plan.chunk_bytes, layout_.size());
  const Chunks pieces_ = split_chunks(operation_.count, element_bytes_, lane_bytes_);
  const size_t piece_bytes_ = round_up(pieces_.elements * element_bytes_, kCacheLine);
  const size_t under_way_ = chunks_under_way(context_.plan.chunk_bytes, pieces_.num_chunks);
  std::vector<int> served_;  // ranks of other nodes whose partner this one is
  std::vector<Window> windows_;
  Traffic* traffic_ = nullptr;
};

void run_reduce_scatter(const RunContext& context) { NodeReduceScatter(context).run(); }

Outline outline_reduce_scatter(const NodeRun& run, const NodeLayout& layout) {
  const size_t element_bytes = size_of(run.dtype);
  const Chunks pieces =
      split_chunks(run.count, element_bytes, lane_bytes_of(run.chunk_bytes, layout.size()));
  const size_t piece_bytes = pieces.elements * element_bytes;
  Outline outline{"direct",
                  partners_of(layout),
                  pieces.num_chunks,
                  piece_bytes,
                  chunks_under_way(run.chunk_bytes, pieces.num_chunks),
                  (layout.size() - layout.num_rails()) * run.bytes(),
                  {}};
  if (shares_nodes(layout)) {
    outline.phases.push_back({kWithin,
                              "by shared memory the rail's rank on every node adds up what its "
                              "node's ranks have for a rank",
                              piece_bytes});
  }
  outline.phases.push_back({kBetween,
                            "each sum goes along the rail to the rank that it is for, which adds "
                            "up the nodes' sums",
                            piece_bytes});
  return outline;
}

}  // namespace

const Algorithm kHierarchicalReduceScatter{
    AlgorithmName::kHierarchical, DPT_REDUCE_SCATTER, run_reduce_scatter, outline_reduce_scatter};

}  // namespace dpt
