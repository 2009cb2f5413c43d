// torch's rendezvous store behind the core's C ABI.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "deepytorch.h"

namespace dpt::c10d_adapter {

// `store` must outlive what the table is given to.
dpt_store store_table(c10d::Store* store);

// Whether all keys were there before `limit` had passed, and before the store was of no use any
// more.
bool wait_for_keys(c10d::Store& store,
                   const std::vector<std::string>& keys,
                   std::chrono::milliseconds limit);

}  // namespace dpt::c10d_adapter
