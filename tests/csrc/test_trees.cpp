// Spanning trees packed from the links between GPUs: against what no set of trees can do better,
// and against stars.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "cuda/trees/trees.hpp"
#include "topology/topology.hpp"

namespace dpt {
namespace {

using cuda::kMaxRanks;
using cuda::Trees;

LinkMatrix all_linked(int size, int link) {
  LinkMatrix links{size};
  for (int a = 0; a < size; ++a) {
    for (int b = 0; b < size; ++b) links.set(a, b, a == b ? LinkMatrix::kNone : link);
  }
  return links;
}
LinkMatrix bridged_pairs(int size, int nvlinks) {
  LinkMatrix links = all_linked(size, LinkMatrix::kPcie);
  for (int a = 0; a < size; a += 2) links.set(a, a + 1, nvlinks);
  return links;
}
// A ring of four without its diagonals.
LinkMatrix cycle_of_four() { return *parse_links("-2-1,2-1-,-1-2,1-2-"); }

LinkMatrix links_of(const Topology& machine, bool partial) {
  LinkMatrix links{static_cast<int>(machine.gpus.size())};
  for (int a = 0; a < links.size; ++a) {
    links.between[a][a] = LinkMatrix::kNone;
    for (int b = 0; b < a; ++b) {
      const GpuLink* link = find_link(machine, a, b);
      const int nvlinks = link != nullptr ? link->nvlinks : 0;
      links.set(a, b, nvlinks == 0 && partial ? LinkMatrix::kNone : nvlinks);
    }
  }
  return links;
}
Topology recorded(const std::string& name) {
  std::ifstream file(std::filesystem::path(DPT_MACHINES) / (name + ".json"));
  std::stringstream text;
  text << file.rdbuf();
  return load_topology(text.str());
}

// How far each rank is from the root; fails where a tree is none or uses links that aren't there.
int most_hops(const LinkMatrix& links, const Trees& trees) {
  int most = 0;
  for (int root = 0; root < links.size; ++root) {
    EXPECT_EQ(trees.parent[root][root], -1);
    for (int rank = 0; rank < links.size; ++rank) {
      int hops = 0;
      for (int at = rank; at != root; ++hops) {
        const int parent = trees.parent[root][at];
        if (parent < 0 || hops == links.size || !links.exist(at, parent)) {
          ADD_FAILURE() << to_text(links) << ": no way from rank " << rank << " to " << root;
          return -1;
        }
        at = parent;
      }
      most = std::max(most, hops);
    }
  }
  return most;
}

// By a rank over PCIe, in shares in one direction: up and down.
int over_pcie(const LinkMatrix& links, const Trees& trees, int rank) {
  int shares = 0;
  for (int root = 0; root < links.size; ++root) {
    for (int from = 0; from < links.size; ++from) {
      const int to = trees.parent[root][from];
      if (to < 0 || (from != rank && to != rank)) continue;
      if (links.between[from][to] == LinkMatrix::kPcie) ++shares;
    }
  }
  return shares;
}

// Trees of fewest hops, each rank hanging on the first that it can.
Trees simple_trees(const LinkMatrix& links) {
  Trees trees;
  for (int root = 0; root < links.size; ++root) {
    std::fill_n(trees.parent[root], kMaxRanks, int8_t{-1});
    std::vector<int> queue = {root};
    for (size_t next = 0; next < queue.size(); ++next) {
      for (int rank = 0; rank < links.size; ++rank) {
        if (rank == root || trees.parent[root][rank] >= 0 || !links.exist(rank, queue[next])) {
          continue;
        }
        trees.parent[root][rank] = static_cast<int8_t>(queue[next]);
        queue.push_back(rank);
      }
    }
  }
  return trees;
}

TEST(Trees, AreStarsWhereAllLinksAreAlike) {
  for (int size = 2; size <= kMaxRanks; ++size) {
    for (const int link : {LinkMatrix::kPcie, 1, 18}) {
      const LinkMatrix links = all_linked(size, link);
      EXPECT_TRUE(are_alike(links));
      const auto trees = pack_trees(links);
      ASSERT_TRUE(trees);
      EXPECT_EQ(most_hops(links, *trees), 1);
    }
  }
}

// With `pairs` pairs every tree has at least pairs - 1 edges over PCIe, with two ends each. There
// are as many trees as GPUs, so a GPU has 2 (pairs - 1) such ends on average.
TEST(Trees, OfBridgedPairsSendAsLittleOverPcieAsAnyCan) {
  for (const int size : {4, 6, 8}) {
    const int pairs = size / 2;
    const LinkMatrix links = bridged_pairs(size, 4);
    EXPECT_FALSE(are_alike(links));
    EXPECT_TRUE(are_complete(links));
    const auto trees = pack_trees(links);
    ASSERT_TRUE(trees);
    EXPECT_LE(most_hops(links, *trees), 4);
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(over_pcie(links, *trees, rank), 2 * (pairs - 1)) << "rank " << rank;
      // Stars: from each of the others' GPUs to the root, and from here to each of their roots.
      EXPECT_EQ(over_pcie(links, simple_trees(links), rank), 2 * (size - 2)) << "rank " << rank;
    }
  }
}

// No tree can do with less than an edge for every rank but the root, on all links together.
double least_load_without_pcie(const LinkMatrix& links) {
  int nvlinks = 0;
  for (int a = 0; a < links.size; ++a) {
    for (int b = 0; b < a; ++b) nvlinks += std::max<int>(links.between[a][b], 0);
  }
  return static_cast<double>(links.size * (links.size - 1)) / nvlinks;
}

TEST(Trees, OfHybridCubesUseTheirLinksAlone) {
  for (const std::string name : {"8xv100_hybrid_mesh"}) {
    const LinkMatrix links = links_of(recorded(name), /*partial=*/true);
    EXPECT_FALSE(are_complete(links));
    const auto trees = pack_trees(links);
    ASSERT_TRUE(trees);
    EXPECT_LE(most_hops(links, *trees), 5);
    // 56 edges on 8 single and 8 double links: at best 5 on each double and 2 on each single one.
    EXPECT_LE(heaviest_load(links, *trees), 2.5);
    EXPECT_GE(heaviest_load(links, *trees), least_load_without_pcie(links));
    EXPECT_GE(heaviest_load(links, simple_trees(links)), 4);
  }
}

TEST(Trees, OfRecordedMachines) {
  const LinkMatrix pairs = links_of(recorded("4xa6000_bridged_pairs"), /*partial=*/false);
  EXPECT_EQ(to_text(pairs), to_text(bridged_pairs(4, pairs.between[0][1])));
  const LinkMatrix mesh = links_of(recorded("8xv100_hybrid_mesh"), /*partial=*/false);
  const auto trees = pack_trees(mesh);
  ASSERT_TRUE(trees);
  most_hops(mesh, *trees);
  EXPECT_LT(heaviest_load(mesh, *trees), heaviest_load(mesh, simple_trees(mesh)));
  const LinkMatrix nvswitch = links_of(recorded("8xh100_nvswitch"), /*partial=*/false);
  EXPECT_TRUE(are_alike(nvswitch));
}

TEST(Trees, OfARingLeaveTheDiagonalsAlone) {
  const LinkMatrix links = cycle_of_four();
  const auto trees = pack_trees(links);
  ASSERT_TRUE(trees);
  EXPECT_LE(most_hops(links, *trees), 3);
  // 12 edges: at most 3 of each tree, 4 each on the links of two.
  EXPECT_LE(heaviest_load(links, *trees), 2);
}

TEST(Trees, AreNoneWhereSomeRanksCannotBeReached) {
  EXPECT_FALSE(pack_trees(*parse_links("-4--,4---,---4,--4-")));
  EXPECT_FALSE(pack_trees(*parse_links("--,--")));
  EXPECT_TRUE(pack_trees(*parse_links("-p,p-")));
}

TEST(Trees, OfAnyConnectedLinksAreTreesAndNeverWorseThanSimpleOnes) {
  std::mt19937 random(5);
  int connected = 0;
  for (int times = 0; times < 150; ++times) {
    const int size = 2 + static_cast<int>(random() % (kMaxRanks - 1));
    LinkMatrix links{size};
    for (int a = 0; a < size; ++a) {
      links.between[a][a] = LinkMatrix::kNone;
      for (int b = 0; b < a; ++b) {
        const bool none = random() % 4 == 0;
        links.set(a, b, none ? LinkMatrix::kNone : static_cast<int>(random() % 5));
      }
    }
    const Trees simple = simple_trees(links);
    bool reaches_all = true;
    for (int rank = 1; rank < size; ++rank) reaches_all &= simple.parent[0][rank] >= 0;
    const auto trees = pack_trees(links);
    ASSERT_EQ(trees.has_value(), reaches_all) << to_text(links);
    if (!trees) continue;
    ++connected;
    most_hops(links, *trees);
    EXPECT_LE(heaviest_load(links, *trees), heaviest_load(links, simple)) << to_text(links);
    const auto again = pack_trees(links);
    EXPECT_TRUE(std::equal(trees->parent[0], trees->parent[size], again->parent[0]));
  }
  EXPECT_GT(connected, 100);
}

TEST(LinkMatrix, AreWrittenInLetters) {
  for (const std::string text : {"-4pp 4-pp pp-4 pp4-", "-i i-", "-2-1 2-1- -1-2 1-2-", "-"}) {
    const auto links = parse_links(text);
    ASSERT_TRUE(links) << text;
    EXPECT_EQ(to_text(*links), text);
  }
  for (const std::string text : {"", "-p", "-p p", "-4 3-", "-z z-", "-p  p-"}) {
    EXPECT_FALSE(parse_links(text)) << text;
  }
}

}  // namespace
}  // namespace dpt
