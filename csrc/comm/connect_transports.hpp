// Connects the ranks of a group, once they have met: by shared memory within nodes, over the
// network between them.
#pragma once

#include "base/wait.hpp"
#include "bootstrap/exchange.hpp"
#include "bootstrap/store.hpp"
#include "comm/group_facts.hpp"
#include "comm/group_state.hpp"
#include "transport/shm/segment.hpp"
#include "transport/tcp/connection.hpp"

namespace dpt {

// Called by all ranks of the group. Leaves in the state what they have found; without a segment
// there is nothing native, for the same reason on all of them.
void connect_transports(const GroupFacts& facts,
                        GroupState& state,
                        const Meeting& meeting,
                        const WaitContext& wait,
                        Store& store);

// All ranks of the segment's node hear of any trouble between nodes.
Connection::Host host_of(Segment& segment);

}  // namespace dpt
