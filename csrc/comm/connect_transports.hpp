// Connects the ranks of a group, once they have met: by shared memory within nodes, over the
// network between them.
#pragma once

#include <memory>

#include "base/wait.hpp"
#include "bootstrap/exchange.hpp"
#include "bootstrap/store.hpp"
#include "comm/group_facts.hpp"
#include "comm/group_state.hpp"
#include "staged/internode_sender.hpp"

namespace dpt {

// Called by all ranks of the group. Leaves in the state what they have found; without a segment
// there is nothing native, for the same reason on all of them.
void connect_transports(const GroupFacts& facts,
                        GroupState& state,
                        const Meeting& meeting,
                        const WaitContext& wait,
                        Store& store);

// More connections between the nodes of a group that has some, for what goes on beside the
// operations on host memory. Throws Error(DPT_ERR_SYSTEM) where there are none to be had.
std::shared_ptr<staged::Between> connect_between(const GroupFacts& facts,
                                                 const Transports& transports,
                                                 const WaitContext& wait,
                                                 Store& store);

}  // namespace dpt
