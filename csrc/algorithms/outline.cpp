#include "algorithms/outline.hpp"

#include "algorithms/algorithm.hpp"

namespace dpt {

std::vector<std::vector<int>> rails_of(const NodeLayout& layout) {
  std::vector<std::vector<int>> rails(layout.num_rails());
  for (const std::vector<int>& ranks : layout.ranks) {
    for (size_t rail = 0; rail < rails.size(); ++rail) rails[rail].push_back(ranks[rail]);
  }
  return rails;
}

std::vector<std::vector<int>> partners_of(const NodeLayout& layout) {
  if (layout.num_rails() * layout.num_nodes() == layout.size()) return rails_of(layout);
  std::vector<std::vector<int>> pairs;
  for (int rank = 0; rank < layout.size(); ++rank) {
    for (int other = rank + 1; other < layout.size(); ++other) {
      if (layout.linked(rank, other)) pairs.push_back({rank, other});
    }
  }
  return pairs;
}

bool shares_nodes(const NodeLayout& layout) { return layout.size() > layout.num_nodes(); }

std::vector<Outline> outline(const NodeRun& run, const NodeLayout& layout) {
  const Algorithm* algorithm = find_algorithm(run.algorithm, run.collective);
  if (algorithm == nullptr || algorithm->outline == nullptr) return {};
  return {algorithm->outline(run, layout)};
}

}  // namespace dpt
