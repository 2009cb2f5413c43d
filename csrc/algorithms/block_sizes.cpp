#include "algorithms/block_sizes.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"

namespace dpt {
namespace {

// The leader publishes this before the sizes: empty, or which ranks do not agree.
constexpr size_t kVerdictBytes = 256;

bool has_blocks(Collective collective) {
  return collective == DPT_ALL_GATHER || collective == DPT_ALL_TO_ALL;
}

// A rank says what it sends, which in an all_gather is one block, and what it expects of each.
struct Words {
  Words(Collective collective, size_t ranks)
      : per_rank(collective == DPT_ALL_TO_ALL ? ranks : 1), of_rank(per_rank + ranks) {}
  size_t per_rank;
  size_t of_rank;
  size_t bytes_of_rank() const { return of_rank * sizeof(uint64_t); }
};

}  // namespace

bool BlockSizes::fit(Collective collective, const NodeLayout& layout) {
  if (!has_blocks(collective)) return true;
  const size_t ranks = layout.size();
  const Words words(collective, ranks);
  size_t most = 0;
  for (const auto& on_node : layout.ranks) most = std::max(most, on_node.size());
  return kVerdictBytes + ranks * words.per_rank * sizeof(uint64_t) <= Segment::kSmallBytes &&
         words.bytes_of_rank() <= Segment::kSmallBytes &&
         most * words.bytes_of_rank() <= kMostNodeWords;
}

BlockSizes BlockSizes::meet(const RunContext& context) {
  const Operation& operation = context.operation;
  const NodeLayout& layout = context.nodes->layout;
  Segment& segment = context.segment;
  BlockSizes sizes;
  sizes.even_ = operation.bytes();
  if (!has_blocks(operation.collective)) {
    enter_nodes(context);
    return sizes;
  }
  const int parity = context.header_parity();
  const size_t ranks = layout.size();
  DPT_CHECK(fit(operation.collective, layout));
  const Words of(operation.collective, ranks);
  const size_t per_rank = of.per_rank;
  const size_t words_of_rank = of.of_rank;
  const size_t bytes_of_rank = of.bytes_of_rank();
  auto* mine = reinterpret_cast<uint64_t*>(segment.small(context.me(), parity));
  for (size_t i = 0; i < per_rank; ++i) mine[i] = operation.input_bytes(static_cast<int>(i));
  for (size_t i = 0; i < ranks; ++i) {
    mine[per_rank + i] = operation.output_bytes(static_cast<int>(i));
  }
  char* board = segment.small(0, parity);
  const auto words = [&] {
    std::vector<char> all;
    for (int rank = 0; rank < context.size(); ++rank) {
      const char* theirs = segment.small(rank, parity);
      all.insert(all.end(), theirs, theirs + bytes_of_rank);
    }
    return all;
  };
  const auto publish = [&](const std::vector<std::string_view>& all) {
    std::vector<uint64_t> table(ranks * words_of_rank);
    for (size_t rank = 0; rank < ranks; ++rank) {
      const std::string_view node = all[layout.node_of[rank]];
      DPT_CHECK(node.size() == bytes_of_rank * layout.ranks_on(layout.node_of[rank]));
      std::memcpy(&table[rank * words_of_rank],
                  node.data() + layout.local_of[rank] * bytes_of_rank,
                  bytes_of_rank);
    }
    std::string verdict;
    for (size_t from = 0; from < ranks && verdict.empty(); ++from) {
      for (size_t to = 0; to < ranks && verdict.empty(); ++to) {
        const uint64_t sent = table[from * words_of_rank + (per_rank == 1 ? 0 : to)];
        const uint64_t expected = table[to * words_of_rank + per_rank + from];
        if (sent == expected) continue;
        verdict = "rank " + std::to_string(context.nodes->global_ranks[from]) + " sends " +
                  std::to_string(sent) + " bytes to rank " +
                  std::to_string(context.nodes->global_ranks[to]) + ", which expects " +
                  std::to_string(expected);
      }
    }
    std::memset(board, 0, kVerdictBytes);
    verdict.copy(board, kVerdictBytes - 1);
    auto* sent = reinterpret_cast<uint64_t*>(board + kVerdictBytes);
    for (size_t rank = 0; rank < ranks; ++rank) {
      std::memcpy(
          sent + rank * per_rank, &table[rank * words_of_rank], per_rank * sizeof(uint64_t));
    }
  };
  enter_nodes(context, {.words = words, .publish = publish});
  if (board[0] != '\0') {
    throw Error(DPT_ERR_MISMATCH,
                context.wait.describe() + ": " + board +
                    ". The sizes of the parts must agree between sender and receiver");
  }
  sizes.per_rank_ = per_rank;
  const auto* sent = reinterpret_cast<const uint64_t*>(board + kVerdictBytes);
  sizes.sent_.assign(sent, sent + ranks * per_rank);
  return sizes;
}

}  // namespace dpt
