// Hierarchical broadcast: nodes form a chain that begins with the root's. Every rail carries its
// share of each chunk along the chain, so each link carries the message once.
//
// On the root's node, in step t
//   1. the root copies chunk t into its slot
//   2. the others copy chunk t-1 to their outputs; every rail sends its share of it to the next
//   node
// On the other nodes, in step t
//   1. every rail asks for its share of chunk t, to come straight into its output
//   2. takes its share of a chunk some steps ago, sends it on, and copies it to the common buffer
//   3. all copy the other ranks' shares of the chunk before that one to their outputs
// with one barrier a step on each node.
#include <algorithm>
#include <vector>

#include "algorithms/nodes.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

class NodeBroadcast {
 public:
  explicit NodeBroadcast(const RunContext& context) : context_(context) {}

  void run() {
    enter_nodes(context_);
    Traffic traffic(context_, Links::Mover::kReactor);
    traffic_ = &traffic;
    if (nodes_.node() == home_) {
      run_at_home();
    } else {
      run_elsewhere();
    }
    for (const Traffic::Ticket& ticket : sent_) traffic.wait_sent(ticket);
  }

 private:
  bool on_rail() const { return context_.me() < rails_; }
  bool is_root() const { return nodes_.rank == operation_.root; }
  int node_after(int node, int steps) const {
    return (node + steps + layout_.num_nodes()) % layout_.num_nodes();
  }
  int parity(size_t step) const { return (segment_.next_step + step) & 1; }
  size_t length(size_t chunk) const {
    return std::min(chunks_.elements, operation_.count - chunk * chunks_.elements);
  }
  char* output(size_t chunk) const {
    return static_cast<char*>(operation_.outputs[0]) + chunk * chunks_.elements * element_bytes_;
  }
  // Bytes of a rail's share within a chunk.
  Share share(size_t chunk) const {
    const Share elements = share_of(length(chunk), element_bytes_, context_.me(), rails_);
    return {elements.begin * element_bytes_, elements.end * element_bytes_};
  }

  void send_on(size_t chunk, const char* data) {
    const int next = node_after(nodes_.node(), 1);
    if (!on_rail() || next == home_) return;
    const Share own = share(chunk);
    sent_.push_back(
        traffic_->send(layout_.ranks[next][context_.me()], data + own.begin, own.count()));
  }

  void run_at_home() {
    const auto* input = static_cast<const char*>(operation_.inputs[0]);
    const int root = layout_.local_of[operation_.root];
    const size_t chunks = chunks_.num_chunks;
    for (size_t step = 0; step <= chunks; ++step) {
      const bool fills = is_root() && step < chunks && context_.size() > 1;
      const size_t offset = step * chunks_.elements * element_bytes_;
      if (fills) {
        copy(segment_.slot(root, parity(step)), input + offset, length(step) * element_bytes_);
      }
      if (step >= 1) {
        const size_t chunk = step - 1;
        const char* from = is_root() ? input + chunk * chunks_.elements * element_bytes_
                                     : segment_.slot(root, parity(chunk));
        if (output(chunk) != from) copy(output(chunk), from, length(chunk) * element_bytes_);
        send_on(chunk, output(chunk));
      }
      if (context_.size() > 1 && step < chunks) context_.barrier();
    }
    segment_.next_step += chunks;
  }

  void run_elsewhere() {
    const int before = node_after(nodes_.node(), -1);
    const size_t chunks = chunks_.num_chunks;
    std::vector<Traffic::Ticket> coming(chunks);
    const size_t last_step = chunks - 1 + under_way_ + 1;
    for (size_t step = 0; step <= last_step; ++step) {
      if (on_rail() && step < chunks) {
        const Share own = share(step);
        coming[step] = traffic_->receive(
            layout_.ranks[before][context_.me()], output(step) + own.begin, own.count());
      }
      if (on_rail() && step >= under_way_ && step - under_way_ < chunks) {
        const size_t chunk = step - under_way_;
        traffic_->wait_received(coming[chunk]);
        send_on(chunk, output(chunk));
        const Share own = share(chunk);
        if (context_.size() > 1) {
          copy(segment_.result(parity(chunk)) + own.begin, output(chunk) + own.begin, own.count());
        }
      }
      if (step > under_way_ && context_.size() > 1) copy_out(step - under_way_ - 1);
      if (context_.size() > 1 && step < last_step) context_.barrier();
    }
    segment_.next_step += chunks;
  }

  void copy_out(size_t chunk) const {
    const Share own = on_rail() ? share(chunk) : Share{0, 0};
    const char* result = segment_.result(parity(chunk));
    copy(output(chunk), result, own.begin);
    copy(output(chunk) + own.end, result + own.end, length(chunk) * element_bytes_ - own.end);
  }

  const RunContext& context_;
  Segment& segment_ = context_.segment;
  const Operation& operation_ = context_.operation;
  Nodes& nodes_ = *context_.nodes;
  const NodeLayout& layout_ = nodes_.layout;
  const int rails_ = layout_.num_rails();
  const int home_ = layout_.node_of[operation_.root];
  const size_t element_bytes_ = size_of(operation_.dtype);
  const Chunks chunks_ = split_chunks(operation_.count, element_bytes_, context_.plan.chunk_bytes);
  const size_t under_way_ = chunks_under_way(context_.plan.chunk_bytes, chunks_.num_chunks);
  std::vector<Traffic::Ticket> sent_;
  Traffic* traffic_ = nullptr;
};

void run_broadcast(const RunContext& context) { NodeBroadcast(context).run(); }

Outline outline_broadcast(const NodeRun& run, const NodeLayout& layout) {
  const size_t element_bytes = size_of(run.dtype);
  const Chunks chunks = split_chunks(run.count, element_bytes, run.chunk_bytes);
  const size_t chunk_bytes = chunks.elements * element_bytes;
  const size_t share = share_of(chunks.elements, element_bytes, 0, layout.num_rails()).count();
  Outline outline{"chain",
                  rails_of(layout),
                  chunks.num_chunks,
                  chunk_bytes,
                  chunks_under_way(run.chunk_bytes, chunks.num_chunks),
                  run.bytes(),
                  {}};
  if (layout.ranks_on(layout.node_of[run.root]) > 1) {
    outline.phases.push_back(
        {kWithin,
         "the root lays a chunk in shared memory, where its node's ranks copy it out",
         chunk_bytes});
  }
  outline.phases.push_back(
      {kBetween,
       "from the root's node on, every rail carries its share of the chunk from node to node",
       share * element_bytes});
  if (shares_nodes(layout)) {
    outline.phases.push_back({kWithin,
                              "on the other nodes the shares come together in shared memory, where "
                              "all ranks copy them out",
                              chunk_bytes});
  }
  return outline;
}

}  // namespace

const Algorithm kHierarchicalBroadcast{
    AlgorithmName::kHierarchical, DPT_BROADCAST, run_broadcast, outline_broadcast};

}  // namespace dpt
