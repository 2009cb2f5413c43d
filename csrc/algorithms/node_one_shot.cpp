// Small messages between nodes: one exchange of the leaders carries headers and data together.
//
//   1. every rank copies its input into its small buffer
//   2. the nodes meet (enter_nodes): each leader tells the others its node's data, which is the
//      ranks' sum or all their inputs. It combines the data of all nodes in its own small buffer
//   3. every rank copies its part out of the leader's small buffer
//
// The barrier of a group that spans nodes is the meeting alone.
#include <algorithm>
#include <cstring>

#include "algorithms/nodes.hpp"
#include "base/error.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

class OneShot {
 public:
  explicit OneShot(const RunContext& context) : context_(context) {}

  // `count` elements on every rank, summed up; returns where the result is.
  const char* reduce(size_t count) {
    const size_t bytes = count * size_of(operation_.dtype);
    enter_nodes(context_,
                {.words =
                     [&] {
                       std::vector<char> sum(bytes);
                       std::vector<const void*> sources;
                       for (int rank = 0; rank < context_.size(); ++rank) {
                         sources.push_back(small(rank));
                       }
                       reduce_on_node(context_, sources, count, sum.data());
                       return sum;
                     },
                 .publish =
                     [&](const std::vector<std::string_view>& words) {
                       std::vector<const void*> sources;
                       for (const std::string_view& word : words) {
                         DPT_CHECK(word.size() == bytes);
                         sources.push_back(word.data());
                       }
                       reduce_nodes(context_, sources, count, {small(0)});
                     }});
    return small(0);
  }

  // `bytes` of every rank, by rank in the group.
  const char* gather(size_t bytes) {
    enter_nodes(context_,
                {.words =
                     [&] {
                       std::vector<char> all(bytes * context_.size());
                       if (bytes == 0) return all;  // its data may be nowhere
                       for (int rank = 0; rank < context_.size(); ++rank) {
                         std::memcpy(all.data() + rank * bytes, small(rank), bytes);
                       }
                       return all;
                     },
                 .publish =
                     [&](const std::vector<std::string_view>& words) {
                       for (int node = 0; node < layout_.num_nodes(); ++node) {
                         DPT_CHECK(words[node].size() == bytes * layout_.ranks_on(node));
                       }
                       for (int rank = 0; rank < layout_.size(); ++rank) {
                         const char* word = words[layout_.node_of[rank]].data();
                         std::memcpy(
                             small(0) + rank * bytes, word + layout_.local_of[rank] * bytes, bytes);
                       }
                     }});
    return small(0);
  }

  const char* broadcast() {
    const int home = layout_.node_of[operation_.root];
    enter_nodes(context_,
                {.words =
                     [&] {
                       if (context_.nodes->node() != home) return std::vector<char>();
                       const char* data = small(layout_.local_of[operation_.root]);
                       return std::vector<char>(data, data + operation_.bytes());
                     },
                 .publish =
                     [&](const std::vector<std::string_view>& words) {
                       DPT_CHECK(words[home].size() == operation_.bytes());
                       std::memcpy(small(0), words[home].data(), words[home].size());
                     }});
    return small(0);
  }

  char* small(int rank) const { return context_.segment.small(rank, context_.header_parity()); }

 private:
  const RunContext& context_;
  const Operation& operation_ = context_.operation;
  const NodeLayout& layout_ = context_.nodes->layout;
};

void run_reduce(const RunContext& context) {
  const Operation& operation = context.operation;
  OneShot one_shot(context);
  DPT_CHECK(operation.bytes() <= Segment::kSmallBytes);
  copy(one_shot.small(context.me()), operation.inputs[0], operation.bytes());
  const char* result = one_shot.reduce(operation.count);
  if (operation.collective == DPT_REDUCE && context.nodes->rank != operation.root) return;
  copy(operation.outputs[0], result, operation.bytes());
}

void run_one_shot_reduce_scatter(const RunContext& context) {
  const Operation& operation = context.operation;
  const size_t bytes = operation.bytes();
  const int size = context.nodes->layout.size();
  OneShot one_shot(context);
  DPT_CHECK(bytes * size <= Segment::kSmallBytes);
  for (int rank = 0; rank < size; ++rank) {
    copy(one_shot.small(context.me()) + rank * bytes, operation.inputs[rank], bytes);
  }
  const char* result = one_shot.reduce(operation.count * size);
  copy(operation.outputs[0], result + context.nodes->rank * bytes, bytes);
}

void run_all_gather(const RunContext& context) {
  const Operation& operation = context.operation;
  const size_t bytes = operation.bytes();
  const int size = context.nodes->layout.size();
  OneShot one_shot(context);
  DPT_CHECK(bytes * size <= Segment::kSmallBytes);
  copy(one_shot.small(context.me()), operation.inputs[0], bytes);
  const char* result = one_shot.gather(bytes);
  for (int rank = 0; rank < size; ++rank) {
    copy(operation.outputs[rank], result + rank * bytes, bytes);
  }
}

void run_one_shot_broadcast(const RunContext& context) {
  const Operation& operation = context.operation;
  OneShot one_shot(context);
  DPT_CHECK(operation.bytes() <= Segment::kSmallBytes);
  const bool is_root = context.nodes->rank == operation.root;
  if (is_root) copy(one_shot.small(context.me()), operation.inputs[0], operation.bytes());
  const char* result = one_shot.broadcast();
  if (is_root && operation.inputs[0] == operation.outputs[0]) return;
  copy(operation.outputs[0], result, operation.bytes());
}

void run_barrier(const RunContext& context) { enter_nodes(context); }

// The node that says the most tells each other one this much, beside the header.
size_t words_bytes(const NodeRun& run, const NodeLayout& layout) {
  size_t most = 0;
  for (const std::vector<int>& ranks : layout.ranks) most = std::max(most, ranks.size());
  if (run.collective == DPT_ALL_GATHER) return run.bytes() * most;
  if (run.collective == DPT_REDUCE_SCATTER) return run.bytes() * layout.size();
  return run.bytes();
}

Outline outline_one_shot(const NodeRun& run, const NodeLayout& layout) {
  std::vector<int> leaders;
  for (const std::vector<int>& ranks : layout.ranks) leaders.push_back(ranks[0]);
  const size_t words = words_bytes(run, layout);
  const bool gathers = run.collective == DPT_ALL_GATHER;
  const std::string what = gathers                           ? "all that its node's ranks have"
                           : run.collective == DPT_BROADCAST ? "the root's data, if it has them"
                                                             : "its node's sum";
  Outline outline{"direct", {leaders}, 1, words, 1, words * (leaders.size() - 1), {}};
  if (shares_nodes(layout)) {
    outline.phases.push_back(
        {kWithin,
         std::string(run.collective == DPT_BROADCAST ? "the root" : "every rank") +
             " lays its data in shared memory, where its node's first rank takes them",
         run.collective == DPT_REDUCE_SCATTER ? run.bytes() * layout.size() : run.bytes()});
  }
  outline.phases.push_back(
      {kBetween, "the first rank of every node tells all others " + what, words});
  if (shares_nodes(layout)) {
    outline.phases.push_back({kWithin,
                              std::string(run.collective == DPT_REDUCE ? "the root copies the"
                                                                       : "every rank copies its") +
                                  " result out of the memory of its node's first rank",
                              gathers ? run.bytes() * layout.size() : run.bytes()});
  }
  return outline;
}

}  // namespace

const Algorithm kNodeBarrier{AlgorithmName::kNodeBarrier, DPT_BARRIER, run_barrier};
const Algorithm kNodeOneShotAllReduce{
    AlgorithmName::kNodeOneShot, DPT_ALL_REDUCE, run_reduce, outline_one_shot};
const Algorithm kNodeOneShotReduce{
    AlgorithmName::kNodeOneShot, DPT_REDUCE, run_reduce, outline_one_shot};
const Algorithm kNodeOneShotReduceScatter{
    AlgorithmName::kNodeOneShot, DPT_REDUCE_SCATTER, run_one_shot_reduce_scatter, outline_one_shot};
const Algorithm kNodeOneShotAllGather{
    AlgorithmName::kNodeOneShot, DPT_ALL_GATHER, run_all_gather, outline_one_shot};
const Algorithm kNodeOneShotBroadcast{
    AlgorithmName::kNodeOneShot, DPT_BROADCAST, run_one_shot_broadcast, outline_one_shot};

}  // namespace dpt
