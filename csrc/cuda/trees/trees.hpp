// Spanning trees of the ranks along the links there are, for GPUs whose links differ: bridged
// pairs, hybrid cubes. A message has a share for each rank; share r is summed up on its way along
// tree r to the root, rank r, and the sum goes back down.
//
// Many trees together can keep every link busy, as in Blink (Wang et al., "Blink: Fast and Generic
// Collectives for Distributed ML", MLSys 2020). Blink packs trees of one root and of different
// weights. Here each tree has a root of its own and all weigh the same. So stars, which are best
// where all links are alike, are a special case.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "cuda/layout.hpp"

namespace dpt {

namespace cuda {

// A spanning tree of the ranks for each of them, its root: parent[root][rank], -1 for the root.
struct Trees {
  int8_t parent[kMaxRanks][kMaxRanks];
};

}  // namespace cuda

// Between each two ranks, the same in both directions.
struct LinkMatrix {
  static constexpr int kNone = -1;  // neither reaches the other's memory
  static constexpr int kPcie = 0;
  static constexpr int kMost = 18;  // NVLinks of a GPU

  int size = 0;
  std::array<std::array<int8_t, cuda::kMaxRanks>, cuda::kMaxRanks> between{};  // or NVLinks

  bool exist(int a, int b) const { return a != b && between[a][b] != kNone; }
  void set(int a, int b, int link) {
    between[a][b] = between[b][a] = static_cast<int8_t>(link < kMost ? link : kMost);
  }
};

// Whether each two ranks are linked, and whether they are so in the same way.
bool are_complete(const LinkMatrix& links);
bool are_alike(const LinkMatrix& links);
// Whether each rank is reached from each other, by way of others where need be.
bool are_connected(const LinkMatrix& links);

// A row for each rank, of a letter for each: 'p' for PCIe, 'a' for 10 NVLinks and so on, '-' for
// none: "-4pp 4-pp pp-4 pp4-". Back from that, also with commas: nothing where it is none.
std::string to_text(const LinkMatrix& links);
std::optional<LinkMatrix> parse_links(const std::string& text);

// The load of the heaviest loaded link in either direction, up and down together: in shares, where
// a link is worth one NVLink.
double heaviest_load(const LinkMatrix& links, const cuda::Trees& trees);

// Trees that load the heaviest loaded link as little as a search finds, with few hops beside that.
// Nothing where some ranks have no way to others. The same for the same links; takes milliseconds.
std::optional<cuda::Trees> pack_trees(const LinkMatrix& links);

}  // namespace dpt
