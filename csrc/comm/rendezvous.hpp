// Whether all ranks of a group come to the same place of the program soon.
//
// NOTE [Rendezvous] A rank that waits for the others, to measure with them, may be what they wait
// for: a program may start operations of two groups in different orders on different ranks as long
// as nothing waits on the host. So who has waited for long enough withdraws, once and for all, in
// one step that can't happen when the last rank has just come; whoever comes later sees that at
// once.
#pragma once

#include <cstdint>

#include "algorithms/algorithm.hpp"

namespace dpt {

// This rank is at `place` (below Segment::kNumRendezvous) for the `visit`th time, from 1 on. The
// same answer on every rank: true when all came before one lost patience at `limit`. Throws what
// ends the group.
bool rendezvous(const RunContext& context, int place, uint32_t visit, const Deadline& limit);
// This rank won't come there any more.
void decline(const RunContext& context, int place);

}  // namespace dpt
