#include "cuda/trees/device_links.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace dpt {
namespace {

template <typename Visit>
void for_each_pair(int size, Visit visit) {
  for (int a = 0; a < size; ++a) {
    for (int b = 0; b < a; ++b) visit(a, b);
  }
}

}  // namespace

LinkMatrix links_between(const std::vector<LinksSeen>& ranks) {
  DPT_CHECK(ranks.size() <= static_cast<size_t>(cuda::kMaxRanks));
  LinkMatrix links{static_cast<int>(ranks.size())};
  for (int rank = 0; rank < links.size; ++rank) links.between[rank][rank] = LinkMatrix::kNone;
  std::array<std::array<int8_t, cuda::kMaxRanks>, cuda::kMaxRanks> seen{};
  bool counted = true;
  int best = LinkMatrix::kPcie;
  bool all_one_gpu = true;
  for_each_pair(links.size, [&](int a, int b) {
    const int8_t link = seen[a][b] = std::min(ranks[a].to[b], ranks[b].to[a]);
    counted &= link != kNvlinksUncounted;
    all_one_gpu &= link == kSameGpu;
  });
  const auto resolve = [&](int8_t link) -> int {
    if (link == kUnseen) return LinkMatrix::kPcie;
    const bool nvlinks = link > LinkMatrix::kPcie;
    return nvlinks && !counted ? 1 : link;
  };
  for_each_pair(links.size, [&](int a, int b) {
    if (seen[a][b] != kSameGpu) best = std::max(best, resolve(seen[a][b]));
  });
  if (all_one_gpu) best = 1;
  for_each_pair(links.size, [&](int a, int b) {
    links.set(a, b, seen[a][b] == kSameGpu ? best : resolve(seen[a][b]));
  });
  return links;
}

std::optional<int8_t> emulated_link(const std::string& text, int64_t from, int64_t to) {
  if (text.empty()) return std::nullopt;
  const std::optional<LinkMatrix> links = parse_links(text);
  if (!links) {
    throw Error(DPT_ERR_INVALID,
                "DEEPYTORCH_EMULATE_LINKS=" + text + ": expected a row for each of up to " +
                    std::to_string(cuda::kMaxRanks) +
                    " ranks, separated by commas, with a letter for each rank: - for no link, p "
                    "for PCIe, 1 to 9 or a to i for so many NVLinks; and links alike in both "
                    "directions, as in -2-1,2-1-,-1-2,1-2-");
  }
  const int64_t most = std::max(from, to);
  if (most >= links->size) {
    throw Error(DPT_ERR_INVALID,
                "DEEPYTORCH_EMULATE_LINKS=" + text + " has no row for rank " +
                    std::to_string(most) + ": give one for every rank of the job");
  }
  return links->between[from][to];
}

cuda::Wiring wiring_of(const LinkMatrix& links) {
  if (!are_complete(links)) return cuda::Wiring::kPartial;
  return are_alike(links) ? cuda::Wiring::kAlike : cuda::Wiring::kUnequal;
}

uint32_t neighbours_of(const LinkMatrix& links, int rank) {
  uint32_t neighbours = 0;
  for (int peer = 0; peer < links.size; ++peer) {
    if (links.exist(rank, peer)) neighbours |= 1u << peer;
  }
  return neighbours;
}

}  // namespace dpt
