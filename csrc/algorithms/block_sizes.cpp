#include "algorithms/block_sizes.hpp"

#include <cstring>

#include "base/error.hpp"

namespace dpt {
namespace {

// What the leader publishes before the sizes: empty, or which ranks do not agree.
constexpr size_t kVerdictBytes = 256;

}  // namespace

BlockSizes BlockSizes::meet(const RunContext& context) {
  const Operation& operation = context.operation;
  const NodeLayout& layout = context.nodes->layout;
  Segment& segment = context.segment;
  BlockSizes sizes;
  sizes.even_ = operation.bytes();
  if (operation.collective != DPT_ALL_GATHER && operation.collective != DPT_ALL_TO_ALL) {
    enter_nodes(context);
    return sizes;
  }
  const int parity = context.header_parity();
  const size_t ranks = layout.size();
  const size_t per_rank = operation.collective == DPT_ALL_TO_ALL ? ranks : 1;
  // Of each rank: what it sends, then what it expects of each.
  const size_t words_of_rank = per_rank + ranks;
  const size_t bytes_of_rank = words_of_rank * sizeof(uint64_t);
  DPT_CHECK(kVerdictBytes + ranks * per_rank * sizeof(uint64_t) <= Segment::kSmallBytes);
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
