// The tuner's plan for one operation; identical on every rank of the group.
#pragma once

#include <cstddef>
#include <string>

namespace dpt {

struct Plan {
  const char* algorithm = "delegate";
  size_t chunk_bytes = 0;  // pipeline step
  std::string reason;
};

}  // namespace dpt
