#include "cuda/trees/trees.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <random>
#include <vector>

namespace dpt {
namespace {

using cuda::kMaxRanks;
using cuda::Trees;

// A GPU moves this much over PCIe in one direction, to and from whichever peers, in NVLinks. An
// NVLink carries 25 GB/s in A100 and H100 bridges and V100 cubes, 14 GB/s in A6000 bridges. A x16
// port carries about 12 GB/s of PCIe 3 (V100), 25 of PCIe 4 (A100, A6000) and 50 of PCIe 5 (H100
// NVL). All this is by NVIDIA's data sheets, less PCIe's own overhead.
constexpr double kPortInLinks = 1;

// One tree without a direction: the neighbours of each rank, as bits.
struct Tree {
  std::array<uint8_t, kMaxRanks> next{};

  bool has(int a, int b) const { return (next[a] >> b & 1) != 0; }
  void flip(int a, int b) {
    next[a] ^= static_cast<uint8_t>(1 << b);
    next[b] ^= static_cast<uint8_t>(1 << a);
  }
  // The ranks that `from` still reaches without the edge to `cut`.
  unsigned side_of(int from, int cut) const {
    unsigned found = 1u << from;
    for (unsigned before = 0; before != found;) {
      before = found;
      for (int rank = 0; rank < kMaxRanks; ++rank) {
        if ((before >> rank & 1) == 0) continue;
        found |= next[rank] & ~(rank == from ? 1u << cut : 0u);
      }
    }
    return found;
  }
};

// How many trees use a link. Each does so in both directions: up and down.
class Load {
 public:
  explicit Load(const LinkMatrix& links) : links_(&links) {}

  void add(int a, int b, int trees) {
    if (links_->between[a][b] == LinkMatrix::kPcie) {
      ports_[a] += trees;
      ports_[b] += trees;
    } else {
      pairs_[a][b] += trees;
      pairs_[b][a] += trees;
    }
  }
  double heaviest() const {
    double most = 0;
    for_each([&](double load) { most = std::max(most, load); });
    return most;
  }
  // Falls as the load is spread better; the heaviest part of it counts for most.
  double unevenness() const {
    double sum = 0;
    for_each([&](double load) {
      const double square = load * load;
      sum += square * square * square;
    });
    return sum;
  }

 private:
  template <typename Visit>
  void for_each(Visit visit) const {
    for (int a = 0; a < links_->size; ++a) {
      visit(ports_[a] / kPortInLinks);
      for (int b = a + 1; b < links_->size; ++b) {
        if (links_->between[a][b] > 0)
          visit(static_cast<double>(pairs_[a][b]) / links_->between[a][b]);
      }
    }
  }

  const LinkMatrix* links_;
  std::array<int, kMaxRanks> ports_{};
  std::array<std::array<int, kMaxRanks>, kMaxRanks> pairs_{};
};

// The tree of fewest hops from `root` along the links for which `allows(a, b)`, the best of them
// where there is a choice: every rank's parent, -1 at the root and where no way leads.
template <typename Allows>
std::array<int8_t, kMaxRanks> fewest_hops(const LinkMatrix& links, int root, Allows allows) {
  std::array<int8_t, kMaxRanks> parent;
  parent.fill(-1);
  unsigned reached = 1u << root;
  for (unsigned before = 0; before != reached;) {
    before = reached;
    for (int rank = 0; rank < links.size; ++rank) {
      if ((before >> rank & 1) != 0) continue;
      for (int near = 0; near < links.size; ++near) {
        if ((before >> near & 1) == 0 || !links.exist(near, rank) || !allows(near, rank)) continue;
        const int known = parent[rank];
        if (known < 0 || links.between[near][rank] > links.between[known][rank]) {
          parent[rank] = static_cast<int8_t>(near);
        }
      }
      if (parent[rank] >= 0) reached |= 1u << rank;
    }
  }
  return parent;
}

// All trees of a message, while they are looked for.
class Packing {
 public:
  explicit Packing(const LinkMatrix& links) : links_(&links), load_(links), trees_(links.size) {}

  void add_edge(int root, int a, int b) {
    trees_[root].flip(a, b);
    load_.add(a, b, 1);
  }
  double heaviest() const { return load_.heaviest(); }
  double unevenness() const { return load_.unevenness(); }
  // Far ranks count for more than near ones.
  int hops() const {
    int sum = 0;
    for (int root = 0; root < links_->size; ++root) sum += hops_of(root);
    return sum;
  }
  Trees trees() const {
    Trees found{};
    for (int root = 0; root < links_->size; ++root) {
      const auto parent = parents(root);
      std::copy(parent.begin(), parent.end(), found.parent[root]);
    }
    return found;
  }

  // Exchanges one edge of a tree for another as long as that spreads the load better, or as well
  // with fewer hops.
  void spread() {
    while (exchange_edges([&] { return load_.unevenness(); })) {
    }
  }
  // The same for fewer hops alone, where no link comes to be loaded more than the heaviest loaded
  // is.
  void shorten() {
    const double most = heaviest();
    while (exchange_edges([&] { return std::max(most, load_.heaviest()); })) {
    }
  }

 private:
  std::array<int8_t, kMaxRanks> parents(int root) const {
    return fewest_hops(*links_, root, [&](int a, int b) { return trees_[root].has(a, b); });
  }
  int hops_of(int root) const {
    const auto parent = parents(root);
    int sum = 0;
    for (int rank = 0; rank < links_->size; ++rank) {
      int hops = 0;
      for (int at = rank; at != root; at = parent[at]) ++hops;
      sum += hops * hops;
    }
    return sum;
  }

  struct Edge {
    int a, b;
  };

  // Replaces each edge of each tree in turn by the best of those that could stand in for it. The
  // best has the least `cost()`, then the fewest hops. Returns whether any edge was replaced.
  template <typename Cost>
  bool exchange_edges(Cost cost) {
    bool any = false;
    for (int root = 0; root < links_->size; ++root) {
      for (int a = 0; a < links_->size; ++a) {
        for (int b = a + 1; b < links_->size; ++b) {
          if (trees_[root].has(a, b)) any |= exchange_edge(root, {a, b}, cost);
        }
      }
    }
    return any;
  }
  template <typename Cost>
  bool exchange_edge(int root, Edge old, Cost cost) {
    const unsigned side = trees_[root].side_of(old.a, old.b);
    Edge best = old;
    double best_cost = cost();
    int best_hops = hops_of(root);
    for (int a = 0; a < links_->size; ++a) {
      for (int b = 0; b < links_->size; ++b) {
        const bool joins = (side >> a & 1) != 0 && (side >> b & 1) == 0;
        if (!joins || !links_->exist(a, b)) continue;
        replace(root, old, {a, b});
        const double now = cost();
        if (now <= best_cost) {
          const int hops = hops_of(root);
          if (now < best_cost || hops < best_hops) {
            best = {a, b};
            best_cost = now;
            best_hops = hops;
          }
        }
        replace(root, {a, b}, old);
      }
    }
    replace(root, old, best);
    return best.a != old.a || best.b != old.b;
  }
  void replace(int root, Edge old, Edge other) {
    trees_[root].flip(old.a, old.b);
    load_.add(old.a, old.b, -1);
    add_edge(root, other.a, other.b);
  }

  const LinkMatrix* links_;
  Load load_;
  std::vector<Tree> trees_;
};

Packing with_fewest_hops(const LinkMatrix& links) {
  Packing packing(links);
  for (int root = 0; root < links.size; ++root) {
    const auto parent = fewest_hops(links, root, [](int, int) { return true; });
    for (int rank = 0; rank < links.size; ++rank) {
      if (parent[rank] >= 0) packing.add_edge(root, rank, parent[rank]);
    }
  }
  return packing;
}

// Trees that grow by any edge, all as likely.
Packing grown_at_random(const LinkMatrix& links, std::minstd_rand* random) {
  Packing packing(links);
  for (int root = 0; root < links.size; ++root) {
    for (unsigned reached = 1u << root; reached != (1u << links.size) - 1;) {
      const int a = static_cast<int>((*random)() % links.size);
      const int b = static_cast<int>((*random)() % links.size);
      if ((reached >> a & 1) == 0 || (reached >> b & 1) != 0 || !links.exist(a, b)) continue;
      packing.add_edge(root, a, b);
      reached |= 1u << b;
    }
  }
  return packing;
}

bool is_better(const Packing& one, const Packing& other) {
  if (one.heaviest() != other.heaviest()) return one.heaviest() < other.heaviest();
  if (one.hops() != other.hops()) return one.hops() < other.hops();
  return one.unevenness() < other.unevenness();
}

template <typename Visit>
bool holds_for_each_pair(const LinkMatrix& links, Visit visit) {
  for (int a = 0; a < links.size; ++a) {
    for (int b = 0; b < a; ++b) {
      if (!visit(links.between[a][b])) return false;
    }
  }
  return true;
}

constexpr char kLetters[] = "p123456789abcdefghi";

}  // namespace

bool are_complete(const LinkMatrix& links) {
  return holds_for_each_pair(links, [](int link) { return link != LinkMatrix::kNone; });
}

bool are_alike(const LinkMatrix& links) {
  return holds_for_each_pair(links, [&](int link) { return link == links.between[0][1]; });
}

bool are_connected(const LinkMatrix& links) {
  const auto parent = fewest_hops(links, 0, [](int, int) { return true; });
  return std::count(parent.begin(), parent.begin() + links.size, -1) == 1;
}

std::string to_text(const LinkMatrix& links) {
  std::string text;
  for (int a = 0; a < links.size; ++a) {
    if (a != 0) text += ' ';
    for (int b = 0; b < links.size; ++b) {
      text += links.exist(a, b) ? kLetters[links.between[a][b]] : '-';
    }
  }
  return text;
}

std::optional<LinkMatrix> parse_links(const std::string& text) {
  std::vector<std::string> rows(1);
  for (const char letter : text) {
    if (letter == ' ' || letter == ',') {
      rows.emplace_back();
    } else {
      rows.back() += letter;
    }
  }
  if (rows.size() > kMaxRanks) return std::nullopt;
  const std::string letters = kLetters;
  LinkMatrix links{static_cast<int>(rows.size())};
  for (size_t a = 0; a < rows.size(); ++a) {
    if (rows[a].size() != rows.size()) return std::nullopt;
    for (size_t b = 0; b < rows.size(); ++b) {
      const size_t at = letters.find(rows[a][b]);
      if (rows[a][b] != '-' && at == std::string::npos) return std::nullopt;
      links.between[a][b] = static_cast<int8_t>(rows[a][b] == '-' ? LinkMatrix::kNone : at);
      if (b < a && links.between[a][b] != links.between[b][a]) return std::nullopt;
    }
  }
  return links;
}

double heaviest_load(const LinkMatrix& links, const Trees& trees) {
  Load load(links);
  for (int root = 0; root < links.size; ++root) {
    for (int rank = 0; rank < links.size; ++rank) {
      const int parent = trees.parent[root][rank];
      if (parent >= 0) load.add(rank, parent, 1);
    }
  }
  return load.heaviest();
}

std::optional<Trees> pack_trees(const LinkMatrix& links) {
  if (links.size < 2 || !are_connected(links)) return std::nullopt;
  constexpr int kStarts = 6;
  std::minstd_rand random;  // seeded alike on every rank
  Packing best = with_fewest_hops(links);
  for (int start = 0; start < kStarts; ++start) {
    Packing packing = start == 0 ? best : grown_at_random(links, &random);
    packing.spread();
    packing.shorten();
    if (is_better(packing, best)) best = packing;
  }
  return best.trees();
}

}  // namespace dpt
