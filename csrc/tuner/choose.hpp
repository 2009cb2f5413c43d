// The choice of a plan: a pure function of facts that are the same on every rank.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "algorithms/plan.hpp"
#include "base/types.hpp"
#include "tuner/table.hpp"

namespace dpt {

// The tuner settled on this for a range of sizes; frozen once a group has it.
struct Decision {
  std::optional<Candidate> chosen;  // nothing: the rule of thumb
  std::string reason;               // what the plan says; empty with the rule of thumb
  std::string source;               // "measured now", "profile <path>", ...: for reports
  Entry times;                      // of all candidates; empty: none were measured
};

struct ChooseRequest {
  Collective collective;
  size_t bytes;                  // of one buffer, see dpt_request
  int size;                      // ranks in the group
  std::string not_native;        // not empty: why native code can't serve the request or the group
  size_t fixed_chunk_bytes = 0;  // a user's choice, 0: ours
  size_t max_chunk_bytes = 0;    // of the group's slots
  bool oversubscribed = false;   // the node has fewer cores than ranks
  int nodes = 1;                 // over which the group spans
  bool uneven = false;           // parts differ in size
  const Decision* tuned = nullptr;  // for this collective and size; nullptr: the rule of thumb
};

// Whether the collective has native algorithms at all.
bool is_native_collective(Collective collective);

Plan choose(const ChooseRequest& request);

// Tells of a group that spans nodes whether a message is so small that one exchange of the nodes'
// leaders carries it.
bool is_small_between_nodes(const ChooseRequest& request);

// Whether `candidates` could ever name this one for a collective of tensors on the CPU. Profiles
// may be of another build, or written by people.
bool could_be_candidate(const Candidate& candidate, Collective collective, int nodes);

// The plans worth trying for a request that is cut into chunks, without the delegate. The rule of
// thumb's plan comes first. The others go from small chunks to large ones. There are at most five.
std::vector<Candidate> candidates(const ChooseRequest& request);

// Decides for a group from an entry, pure as `choose`; `found` says where the times come from, as
// in "measured here". Without a usable time it is the rule of thumb.
Decision decide(const Entry& entry, const Limits& limits, const std::string& found);

// "64 KiB", "4 MiB", for messages.
std::string describe_bytes(size_t bytes);

}  // namespace dpt
