// torch's rendezvous store behind the core's C ABI.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "deepytorch.h"

namespace dpt::c10d_adapter {

// `store` must outlive what the table is given to.
dpt_store store_table(c10d::Store* store);

}  // namespace dpt::c10d_adapter
