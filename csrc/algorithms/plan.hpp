// The tuner's plan for one operation; identical on every rank of the group.
#pragma once

#include <cstddef>
#include <string>

#include "base/algorithm_name.hpp"

namespace dpt {

struct Plan {
  AlgorithmName algorithm = AlgorithmName::kDelegate;
  size_t chunk_bytes = 0;  // pipeline step
  std::string reason;
};

}  // namespace dpt
