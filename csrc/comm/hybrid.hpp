// Operations in two parts: the devices' group carries out one and the delegate the other, at the
// same time. CPU-Reduce and NCCL's ring through the host's memory each leave much of a GPU's link
// idle.
#pragma once

#include <functional>

#include "cuda/device_group.hpp"
#include "cuda/plan.hpp"
#include "deepytorch.h"

namespace dpt {

class Segment;

// The delegate, for requests of the core's own on a device.
struct WatchedDelegate {
  const dpt_delegate* delegate;  // nullptr: nothing is left to it
  Segment* segment;              // of the ranks whose watchdogs hear of it when that breaks it

  dpt_status execute(const dpt_request& request, dpt_error* error) const;
};

struct Divided {
  const dpt_request& request;
  const DevicePlan& plan;
  cuda::Stream stream;
  std::function<void(const Error&)> failed;  // see staged::StartHooks
};

// Starts the request as planned, and what the plan leaves to the delegate, behind what is on the
// stream, which goes on behind both. Throws Error, also with what the delegate failed with; then
// the group is broken, since its own part is on its way.
void launch_divided(DeviceGroup& group, const WatchedDelegate& delegate, const Divided& divided);

}  // namespace dpt
