// The parts of a group that its operations use, on host memory and on devices. Each guards itself
// as its header says.
#pragma once

#include "calling_lines.hpp"
#include "coalescing.hpp"
#include "delegation.hpp"
#include "group_setup.hpp"
#include "native_group.hpp"

namespace dpt::c10d_adapter {

struct OperationParts {
  const GroupSetup& setup;
  NativeGroup& native;
  Delegation& delegation;
  Coalescing& coalescing;
  CallingLines& calling_lines;
};

}  // namespace dpt::c10d_adapter
