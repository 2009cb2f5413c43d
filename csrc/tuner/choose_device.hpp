// The choice of a plan for an operation on the device: a pure function of facts that are the same
// on every rank.
#pragma once

#include <string>

#include "base/types.hpp"
#include "cuda/layout.hpp"
#include "cuda/plan.hpp"

namespace dpt {

struct ChooseDeviceRequest {
  Collective collective;
  size_t bytes;            // of one part, see dpt_request; the largest, where ranks know all
  bool even = true;        // all parts have `bytes`
  bool large = true;       // there are kernels for it that take any size
  cuda::Layout layout;     // of the group
  std::string not_native;  // not empty: why native code can't serve the request or the group
};

DevicePlan choose_device(const ChooseDeviceRequest& request);

}  // namespace dpt
