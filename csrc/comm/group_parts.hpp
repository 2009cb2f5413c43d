// The parts of a communicator that its collectives use, on host memory and on devices. Each guards
// itself as its header says.
#pragma once

#include "comm/delegation.hpp"
#include "comm/group_bootstrap.hpp"
#include "comm/group_facts.hpp"
#include "comm/group_state.hpp"
#include "comm/progress.hpp"
#include "comm/submit_order.hpp"

namespace dpt {

struct GroupParts {
  const GroupFacts& facts;
  GroupState& state;
  SubmitOrder& order;
  Delegation& delegation;
  GroupBootstrap& bootstrap;
  Progress& progress;
};

}  // namespace dpt
