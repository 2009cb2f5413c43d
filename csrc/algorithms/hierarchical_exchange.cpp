// Hierarchical all_gather, gather, scatter and all_to_all. Every block crosses the network once, to
// its source's partner on the receiving node. The partner carries it from there by shared memory.
//
// A carrier's slot is cut into lanes. There is one for each block it carries, its own or a
// partner's, that other ranks of its node read. A block for all of them (all_gather, gather) takes
// one lane. Blocks move in pieces as long as their carrier's lanes. In step t every rank
//   1. sends piece t of its blocks for other nodes, from where they lie. It asks for piece t of the
//      blocks it carries, into its output where they are for itself
//   2. copies piece t of its own blocks into its lanes, and those it asked for some steps ago
//   3. copies out of the others' lanes what they put there in step t-1
// with one barrier a step.
#include <algorithm>
#include <vector>

#include "algorithms/block_sizes.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

// `receiver`: a rank, or any rank of the node where all get the same.
struct Block {
  int source;
  int receiver;
};
// A carrier's blocks that other ranks of its node read, each in the lane of its index.
struct Carrier {
  std::vector<Block> lanes;
  size_t lane_bytes;
};

// Knows which blocks there are, and who carries them.
class Blocks {
 public:
  Blocks(Collective collective, int root, size_t chunk_bytes, const NodeLayout& layout)
      : collective_(collective), root_(root), chunk_bytes_(chunk_bytes), layout_(layout) {}

  bool shares_lane() const { return collective_ == DPT_ALL_GATHER || collective_ == DPT_GATHER; }
  bool sends(int rank) const { return collective_ != DPT_SCATTER || rank == root_; }
  bool receives(int rank) const { return collective_ != DPT_GATHER || rank == root_; }

  // The blocks of `source` for ranks of `node`, one for all of them or one each, in the order in
  // which they cross the network.
  std::vector<Block> blocks_for(int source, int node) const {
    std::vector<Block> blocks;
    if (!sends(source)) return blocks;
    for (const int rank : layout_.ranks[node]) {
      if (!receives(rank)) continue;
      blocks.push_back({source, rank});
      if (shares_lane()) break;
    }
    return blocks;
  }

  Carrier carrier(int rank) const {
    Carrier carrier;
    const int node = layout_.node_of[rank];
    for (int source = 0; source < layout_.size(); ++source) {
      if (!sends(source) || layout_.partner(source, node) != rank) continue;
      for (const int receiver : layout_.ranks[node]) {
        if (receiver == rank || !receives(receiver)) continue;
        carrier.lanes.push_back({source, receiver});
        if (shares_lane()) break;
      }
    }
    const size_t chunk = chunk_bytes_;
    carrier.lane_bytes = carrier.lanes.empty()
                             ? chunk
                             : lane_bytes_of(chunk, static_cast<int>(carrier.lanes.size()));
    return carrier;
  }

 private:
  const Collective collective_;
  const int root_;
  const size_t chunk_bytes_;
  const NodeLayout& layout_;
};

size_t pieces_of(size_t bytes, const Carrier& by) {
  return (bytes + by.lane_bytes - 1) / by.lane_bytes;
}

class NodeExchange {
 public:
  explicit NodeExchange(const RunContext& context)
      : context_(context), sizes_(BlockSizes::meet(context)) {}

  void run() {
    plan();
    Traffic traffic(context_, Links::Mover::kReactor);
    traffic_ = &traffic;
    for (size_t step = 0; step <= std::max(node_steps_, own_steps_); ++step) {
      send(step);
      ask(step);
      put_own(step);
      if (step >= under_way_) put_carried(step - under_way_);
      if (step >= 1 && step <= node_steps_) copy_out(step - 1);
      if (context_.size() > 1 && step < node_steps_) context_.barrier();
    }
    if (blocks_.sends(nodes_.rank) && blocks_.receives(nodes_.rank)) {
      const void* input = operation_.inputs[input_for(nodes_.rank)];
      char* output = output_from(nodes_.rank);
      if (input != output) copy(output, input, sizes_.bytes(nodes_.rank, nodes_.rank));
    }
    for (const Traffic::Ticket& ticket : sent_) traffic.wait_sent(ticket);
    segment_.next_step += node_steps_ + 1;
  }

 private:
  // A block of another node that this rank carries, or receives for itself.
  struct Arrival {
    Block block;
    int lane;                                   // -1: nobody else reads it
    char* output;                               // nullptr: it is staged
    size_t staging = 0;                         // its place in each window
    std::vector<Traffic::Ticket> tickets = {};  // by window
  };

  int input_for(int receiver) const { return blocks_.shares_lane() ? 0 : receiver; }
  char* output_from(int source) const {
    const bool one = operation_.collective == DPT_SCATTER;
    return static_cast<char*>(operation_.outputs[one ? 0 : source]);
  }

  size_t pieces(const Block& block, const Carrier& by) const {
    return pieces_of(sizes_.bytes(block.source, block.receiver), by);
  }
  bool is_remote(int rank) const { return layout_.node_of[rank] != nodes_.node(); }

  void plan() {
    for (const int rank : layout_.ranks[nodes_.node()]) carriers_.push_back(blocks_.carrier(rank));
    // The same on all ranks of the node.
    size_t most_carried = 0;
    for (int source = 0; source < layout_.size(); ++source) {
      if (!is_remote(source)) continue;
      const int by = layout_.local_of[layout_.partner(source, nodes_.node())];
      for (const Block& block : blocks_.blocks_for(source, nodes_.node())) {
        most_carried = std::max(most_carried, pieces(block, carriers_[by]));
      }
    }
    under_way_ = chunks_under_way(context_.plan.chunk_bytes, most_carried);
    for (const Carrier& each : carriers_) {
      for (const Block& block : each.lanes) {
        const size_t delay = is_remote(block.source) ? under_way_ : 0;
        if (pieces(block, each) > 0) {
          node_steps_ = std::max(node_steps_, pieces(block, each) + delay);
        }
      }
    }
    plan_arrivals();
    for (const int node : layout_.others(nodes_.node())) {
      Departure departure{
          layout_.partner(nodes_.rank, node), blocks_.blocks_for(nodes_.rank, node), 0};
      if (departure.blocks.empty()) continue;
      const Carrier by = blocks_.carrier(departure.to);
      departure.piece_bytes = by.lane_bytes;
      for (const Block& block : departure.blocks) {
        own_steps_ = std::max(own_steps_, pieces(block, by));
      }
      departures_.push_back(std::move(departure));
    }
  }

  void plan_arrivals() {
    const Carrier& mine = carriers_[context_.me()];
    size_t staged = 0;
    for (int source = 0; source < layout_.size(); ++source) {
      if (!is_remote(source) || layout_.partner(source, nodes_.node()) != nodes_.rank) continue;
      for (const Block& block : blocks_.blocks_for(source, nodes_.node())) {
        Arrival arrival{block, lane_of(mine, block), nullptr};
        const bool for_me =
            blocks_.shares_lane() ? blocks_.receives(nodes_.rank) : block.receiver == nodes_.rank;
        if (for_me) {
          arrival.output = output_from(source);
        } else {
          arrival.staging = staged++;
        }
        arrival.tickets.resize(under_way_ + 1);
        own_steps_ = std::max(own_steps_, pieces(block, mine) + under_way_);
        arrivals_.push_back(std::move(arrival));
      }
    }
    window_bytes_ = staged * mine.lane_bytes;
    const size_t all = window_bytes_ * (under_way_ + 1);
    if (nodes_.scratch.size() < all) nodes_.scratch.resize(all);
  }

  // The number of the carrier's lane that holds the block; -1: none does.
  int lane_of(const Carrier& by, const Block& block) const {
    for (size_t lane = 0; lane < by.lanes.size(); ++lane) {
      const Block& each = by.lanes[lane];
      if (each.source == block.source &&
          (blocks_.shares_lane() || each.receiver == block.receiver)) {
        return static_cast<int>(lane);
      }
    }
    return -1;
  }

  char* lane(int local, size_t index, size_t step) const {
    return segment_.slot(local, (segment_.next_step + step) & 1) +
           index * carriers_[local].lane_bytes;
  }

  void send(size_t piece) {
    for (const Departure& departure : departures_) {
      for (const Block& block : departure.blocks) {
        const size_t begin = piece * departure.piece_bytes;
        const size_t bytes = sizes_.bytes(block.source, block.receiver);
        if (begin >= bytes) continue;
        const auto* input =
            static_cast<const char*>(operation_.inputs[input_for(block.receiver)]) + begin;
        sent_.push_back(
            traffic_->send(departure.to, input, std::min(departure.piece_bytes, bytes - begin)));
      }
    }
  }

  // A piece of an arrival lies at this place until it is copied on.
  char* place_of(const Arrival& arrival, size_t piece) const {
    const size_t lane_bytes = carriers_[context_.me()].lane_bytes;
    if (arrival.output != nullptr) return arrival.output + piece * lane_bytes;
    return nodes_.scratch.data() + piece % (under_way_ + 1) * window_bytes_ +
           arrival.staging * lane_bytes;
  }

  // Bytes of a piece of a block that this rank carries; 0 past its end.
  size_t piece_bytes(const Block& block, const Carrier& by, size_t piece) const {
    const size_t bytes = sizes_.bytes(block.source, block.receiver);
    const size_t begin = std::min(bytes, piece * by.lane_bytes);
    return std::min(by.lane_bytes, bytes - begin);
  }

  void ask(size_t piece) {
    for (Arrival& arrival : arrivals_) {
      const size_t bytes = piece_bytes(arrival.block, carriers_[context_.me()], piece);
      if (bytes == 0) continue;
      arrival.tickets[piece % (under_way_ + 1)] =
          traffic_->receive(arrival.block.source, place_of(arrival, piece), bytes);
    }
  }

  void put_own(size_t step) const {
    const Carrier& mine = carriers_[context_.me()];
    for (size_t index = 0; index < mine.lanes.size(); ++index) {
      const Block& block = mine.lanes[index];
      const size_t bytes = piece_bytes(block, mine, step);
      if (block.source != nodes_.rank || bytes == 0) continue;
      const auto* input = static_cast<const char*>(operation_.inputs[input_for(block.receiver)]);
      copy(lane(context_.me(), index, step), input + step * mine.lane_bytes, bytes);
    }
  }

  void put_carried(size_t piece) const {
    const Carrier& mine = carriers_[context_.me()];
    for (const Arrival& arrival : arrivals_) {
      const size_t bytes = piece_bytes(arrival.block, mine, piece);
      if (bytes == 0) continue;
      traffic_->wait_received(arrival.tickets[piece % (under_way_ + 1)]);
      if (arrival.lane < 0) continue;
      copy(lane(context_.me(), static_cast<size_t>(arrival.lane), piece + under_way_),
           place_of(arrival, piece),
           bytes);
    }
  }

  // Copies what the others put into their lanes for this rank in `step`.
  void copy_out(size_t step) const {
    if (!blocks_.receives(nodes_.rank)) return;
    for (int distance = 1; distance < context_.size(); ++distance) {
      const int local = (context_.me() + distance) % context_.size();
      const Carrier& by = carriers_[local];
      for (size_t index = 0; index < by.lanes.size(); ++index) {
        const Block& block = by.lanes[index];
        const size_t delay = is_remote(block.source) ? under_way_ : 0;
        if (!(blocks_.shares_lane() || block.receiver == nodes_.rank) || step < delay) continue;
        const size_t piece = step - delay;
        const size_t bytes = piece_bytes(block, by, piece);
        if (bytes == 0) continue;
        copy(output_from(block.source) + piece * by.lane_bytes, lane(local, index, step), bytes);
      }
    }
  }

  // This rank's blocks for the ranks of another node.
  struct Departure {
    int to;
    std::vector<Block> blocks;
    size_t piece_bytes;
  };

  const RunContext& context_;
  Segment& segment_ = context_.segment;
  const Operation& operation_ = context_.operation;
  Nodes& nodes_ = *context_.nodes;
  const NodeLayout& layout_ = nodes_.layout;
  const BlockSizes sizes_;
  const Blocks blocks_{
      operation_.collective, operation_.root, context_.plan.chunk_bytes, nodes_.layout};
  std::vector<Carrier> carriers_;  // by local rank
  std::vector<Arrival> arrivals_;
  std::vector<Departure> departures_;
  size_t window_bytes_ = 0;  // of staged arrivals, per piece under way
  size_t under_way_ = 1;
  size_t node_steps_ = 0;  // in which something is put into lanes; the same on all local ranks
  size_t own_steps_ = 0;   // in which this rank sends or takes something
  std::vector<Traffic::Ticket> sent_;
  Traffic* traffic_ = nullptr;
};

void run_node_exchange(const RunContext& context) { NodeExchange(context).run(); }

std::string words_of_delivery(Collective collective) {
  if (collective == DPT_GATHER) return "where the root copies them out, its node's own ranks' too";
  return "where the ranks that they are for copy them out, those of the node's own ranks too";
}

Outline outline_exchange(const NodeRun& run, const NodeLayout& layout) {
  const Blocks blocks(run.collective, run.root, run.chunk_bytes, layout);
  size_t most_pieces = 0;
  size_t piece_bytes = 0;
  size_t most_sent = 0;
  for (int node = 0; node < layout.num_nodes(); ++node) {
    size_t sent = 0;
    for (const int source : layout.ranks[node]) {
      for (const int other : layout.others(node)) {
        const size_t count = blocks.blocks_for(source, other).size();
        if (count == 0) continue;
        const Carrier by = blocks.carrier(layout.partner(source, other));
        sent += count * run.bytes();
        piece_bytes = std::max(piece_bytes, std::min(by.lane_bytes, run.bytes()));
        most_pieces = std::max(most_pieces, pieces_of(run.bytes(), by));
      }
    }
    most_sent = std::max(most_sent, sent);
  }
  Outline outline{"direct",
                  partners_of(layout),
                  most_pieces,
                  piece_bytes,
                  chunks_under_way(run.chunk_bytes, most_pieces),
                  most_sent,
                  {}};
  outline.phases.push_back({kBetween,
                            std::string(run.collective == DPT_SCATTER ? "the root" : "every rank") +
                                " sends its blocks for another node along its rail, each once",
                            piece_bytes});
  if (shares_nodes(layout)) {
    outline.phases.push_back(
        {kWithin,
         "what came lies in shared memory, " + words_of_delivery(run.collective),
         piece_bytes});
  }
  return outline;
}

}  // namespace

const Algorithm kHierarchicalAllGather{
    AlgorithmName::kHierarchical, DPT_ALL_GATHER, run_node_exchange, outline_exchange};
const Algorithm kHierarchicalGather{
    AlgorithmName::kHierarchical, DPT_GATHER, run_node_exchange, outline_exchange};
const Algorithm kHierarchicalScatter{
    AlgorithmName::kHierarchical, DPT_SCATTER, run_node_exchange, outline_exchange};
const Algorithm kHierarchicalAllToAll{
    AlgorithmName::kHierarchical, DPT_ALL_TO_ALL, run_node_exchange, outline_exchange};

}  // namespace dpt
