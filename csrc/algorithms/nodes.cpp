#include "algorithms/nodes.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "host/reduce.hpp"

namespace dpt {
namespace {

// When a rank does not come, its own node knows best what is wrong, and what it says there reaches
// the others within these.
constexpr std::chrono::milliseconds kGraceBetweenNodes{400};
constexpr std::chrono::milliseconds kGraceForLeader{800};

// A node describes the operation its ranks entered by this.
struct NodeHeader {
  OpHeader first;  // of the leader
  OpHeader other;  // of the first local rank that entered another operation
  int64_t first_rank;
  int64_t other_rank;  // -1: all entered the same
};

NodeHeader header_of_node(const RunContext& context) {
  Segment& segment = context.segment;
  const int parity = context.header_parity();
  NodeHeader node{segment.header(0, parity), {}, segment.global_rank(0), -1};
  for (int rank = 1; rank < context.size(); ++rank) {
    if (same_operation(node.first, segment.header(rank, parity))) continue;
    node.other = segment.header(rank, parity);
    node.other_rank = segment.global_rank(rank);
    break;
  }
  return node;
}

void publish_place(const RunContext& context) {
  const Operation& operation = context.operation;
  Segment& segment = context.segment;
  const int parity = context.header_parity();
  const auto place = [&](const void* buffer) {
    const auto offset =
        buffer == nullptr ? std::nullopt : segment.offset_of(buffer, operation.bytes());
    return BufferInfo{operation.bytes(), offset.value_or(BufferInfo::kPrivate)};
  };
  const bool one_each =
      operation.collective == DPT_ALL_REDUCE || operation.collective == DPT_REDUCE;
  segment.inputs(context.me(), parity)[0] = place(one_each ? operation.inputs[0] : nullptr);
  segment.outputs(context.me(), parity)[0] = place(one_each ? operation.outputs[0] : nullptr);
}

bool all_same(const std::vector<NodeHeader>& nodes) {
  return std::all_of(nodes.begin(), nodes.end(), [&](const NodeHeader& node) {
    return node.other_rank < 0 && same_operation(nodes[0].first, node.first);
  });
}

void check_all_same(const RunContext& context, const std::vector<NodeHeader>& nodes) {
  for (const NodeHeader& node : nodes) {
    const EnteredBy one{nodes[0].first_rank, nodes[0].first};
    if (!same_operation(nodes[0].first, node.first)) {
      throw_mismatch(context, one, {node.first_rank, node.first});
    }
    if (node.other_rank >= 0) throw_mismatch(context, one, {node.other_rank, node.other});
  }
}

// Step 2. Returns every node's header.
std::vector<NodeHeader> lead(const RunContext& context, const LeaderPart& leader) {
  const Nodes& nodes = *context.nodes;
  std::vector<NodeHeader> headers(nodes.num_nodes());
  headers[nodes.node()] = header_of_node(context);
  std::vector<std::vector<char>> mail(nodes.num_nodes());
  std::vector<char>& own = mail[nodes.node()];
  own.resize(sizeof(NodeHeader));
  std::memcpy(own.data(), &headers[nodes.node()], sizeof(NodeHeader));
  if (leader.words && headers[nodes.node()].other_rank < 0) {
    const std::vector<char> words = leader.words();
    DPT_CHECK(words.size() <= kMostNodeWords);
    own.insert(own.end(), words.begin(), words.end());
  }
  const WaitContext wait{context.wait.deadline.later(kGraceBetweenNodes),
                         context.wait.describe,
                         context.wait.interrupted,
                         context.wait.check_peers};
  const RunContext patient{
      context.segment, context.operation, context.plan, wait, context.style, context.nodes};
  Traffic traffic(patient, Links::Mover::kCaller);
  std::vector<Traffic::Ticket> sent;
  std::vector<Traffic::Ticket> received(nodes.num_nodes());
  for (const int node : nodes.layout.others(nodes.node())) {
    const int rank = nodes.layout.ranks[node][0];
    mail[node].resize(sizeof(NodeHeader) + kMostNodeWords);
    received[node] = traffic.receive(rank, mail[node].data(), mail[node].size());
    sent.push_back(traffic.send(rank, own.data(), own.size()));
  }
  std::vector<std::string_view> words(nodes.num_nodes());
  for (int node = 0; node < nodes.num_nodes(); ++node) {
    if (node != nodes.node()) mail[node].resize(traffic.wait_received(received[node]));
    DPT_CHECK(mail[node].size() >= sizeof(NodeHeader));
    std::memcpy(&headers[node], mail[node].data(), sizeof(NodeHeader));
    words[node] = {mail[node].data() + sizeof(NodeHeader), mail[node].size() - sizeof(NodeHeader)};
  }
  for (const Traffic::Ticket& ticket : sent) traffic.wait_sent(ticket);
  if (leader.publish && all_same(headers)) leader.publish(words);
  return headers;
}

}  // namespace

void enter_nodes(const RunContext& context, const LeaderPart& leader) {
  Segment& segment = context.segment;
  Nodes& nodes = *context.nodes;
  publish_header(context);
  publish_place(context);
  context.barrier();
  // The headers go round in a slot of the leader's.
  std::vector<NodeHeader> headers(nodes.num_nodes());
  const size_t bytes = headers.size() * sizeof(NodeHeader);
  char* board = segment.slot(0, segment.next_step & 1);
  DPT_CHECK(bytes <= segment.max_chunk_bytes());
  if (context.me() == 0) {
    headers = lead(context, leader);
    std::memcpy(board, headers.data(), bytes);
  }
  const WaitContext wait{context.wait.deadline.later(kGraceForLeader),
                         context.wait.describe,
                         context.wait.interrupted,
                         context.wait.check_peers};
  segment.barrier(wait, context.style);
  std::memcpy(static_cast<void*>(headers.data()), board, bytes);
  segment.next_step += 1;
  note_arrivals(context);
  check_all_same(context, headers);
}

void reduce_on_node(const RunContext& context,
                    const std::vector<const void*>& sources,
                    size_t count,
                    void* destination) {
  const Operation& operation = context.operation;
  std::vector<double> factors;
  ReduceOp op = operation.reduce_op;
  if (op == DPT_PREMUL_SUM) {
    for (int rank = 0; rank < context.size(); ++rank) {
      factors.push_back(context.segment.header(rank, context.header_parity()).premul_factor);
    }
  }
  if (op == DPT_AVG && size_of(operation.dtype) != 2) op = DPT_SUM;
  reduce({.dtype = operation.dtype,
          .op = op,
          .sources = sources.data(),
          .num_sources = static_cast<int>(sources.size()),
          .factors = factors.data(),
          .count = count,
          .destination = destination});
}

void reduce_nodes(const RunContext& context,
                  const std::vector<const void*>& sources,
                  size_t count,
                  const std::vector<void*>& destinations) {
  const Operation& operation = context.operation;
  const NodeLayout& layout = context.nodes->layout;
  std::vector<double> factors;
  ReduceOp op = operation.reduce_op;
  if (op == DPT_PREMUL_SUM) op = DPT_SUM;
  if (op == DPT_AVG && size_of(operation.dtype) == 2) {
    op = DPT_PREMUL_SUM;
    for (int node = 0; node < layout.num_nodes(); ++node) {
      factors.push_back(static_cast<double>(layout.ranks_on(node)) / layout.size());
    }
  }
  reduce({.dtype = operation.dtype,
          .op = op,
          .sources = sources.data(),
          .num_sources = static_cast<int>(sources.size()),
          .factors = factors.data(),
          .divisor = layout.size(),
          .count = count,
          .destination = destinations[0],
          .copies = destinations.data() + 1,
          .num_copies = static_cast<int>(destinations.size()) - 1});
}

void add_nodes(const RunContext& context,
               const std::vector<const void*>& sources,
               size_t count,
               void* destination) {
  const ReduceOp op = context.operation.reduce_op;
  const bool sums = op == DPT_AVG || op == DPT_PREMUL_SUM;
  reduce({.dtype = context.operation.dtype,
          .op = sums ? DPT_SUM : op,
          .sources = sources.data(),
          .num_sources = static_cast<int>(sources.size()),
          .count = count,
          .destination = destination});
}

size_t chunks_under_way(size_t chunk_bytes, size_t num_chunks) {
  constexpr size_t kBytesUnderWay = 4 << 20;
  const size_t wanted = std::clamp<size_t>(kBytesUnderWay / std::max<size_t>(chunk_bytes, 1), 2, 8);
  return std::min(wanted, std::max<size_t>(num_chunks, 1));
}

}  // namespace dpt
