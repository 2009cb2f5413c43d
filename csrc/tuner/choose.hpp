// The choice of a plan: a pure function of facts that are the same on every rank.
#pragma once

#include "algorithms/plan.hpp"
#include "base/types.hpp"

namespace dpt {

struct ChooseRequest {
  Collective collective;
  size_t bytes;                  // of one buffer, see dpt_request
  int size;                      // ranks in the group
  std::string not_native;        // not empty: why native code can't serve the request or the group
  size_t fixed_chunk_bytes = 0;  // a user's choice, 0: ours
  size_t max_chunk_bytes = 0;    // of the group's slots
};

// Whether the collective has native algorithms at all.
bool is_native_collective(Collective collective);

Plan choose(const ChooseRequest& request);

}  // namespace dpt
