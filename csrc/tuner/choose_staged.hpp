// The choice of a plan for an operation of GPUs that are staged through the host's memory
// (csrc/staged). It is pure, as choose_device.hpp, which comes here for such groups.
#pragma once

#include <string>
#include <vector>

#include "tuner/choose_device.hpp"

namespace dpt {

// Whether the delegate can carry out a part of such an operation while CPU-Reduce does the rest.
// That can pay because the ring through the host's memory leaves much of a GPU's link idle.
bool can_be_divided(Collective collective, DataType dtype, ReduceOp op);

// The delegate, if there is one, gets whatever can be served, unless it was measured slower.
DevicePlan choose_staged(const ChooseDeviceRequest& request);

// The plans worth trying, the rule of thumb's first; none that takes more workers for nothing.
std::vector<Candidate> staged_candidates(const ChooseDeviceRequest& request);

// The bucket that is tried for messages of that one. Long ones take the same way in more chunks,
// and trials of them a good part of what a process may spend.
int tried_for(int bucket);

// How many workers a rank has where it and the program share so many cores.
int usual_workers(int cores);

// Its parameters, for people.
std::string describe_staged(const Candidate& candidate);

}  // namespace dpt
