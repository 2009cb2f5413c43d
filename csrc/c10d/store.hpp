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

// Until all keys are there, `limit` has passed, or the store is of no use any more.
void wait_for_keys(c10d::Store& store,
                   const std::vector<std::string>& keys,
                   std::chrono::milliseconds limit);

}  // namespace dpt::c10d_adapter
