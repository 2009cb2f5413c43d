#pragma once

#include "deepytorch.h"

namespace dpt {

// The function table of this core; lives as long as the process.
const dpt_api* api();

}  // namespace dpt
