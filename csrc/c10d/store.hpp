// torch's rendezvous store behind the core's C ABI.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "deepytorch.h"

namespace dpt::c10d_adapter {

// `store` must outlive what the table is given to.
dpt_store store_table(c10d::Store* store);

// Called about once a second by who waits for `keys`; what it throws ends the wait.
using OnWait =
    std::function<void(const std::vector<std::string>& keys, std::chrono::duration<double> waited)>;

// Whether all keys were there before `limit` had passed. Throws what the store throws.
bool await_keys(c10d::Store& store,
                const std::vector<std::string>& keys,
                std::chrono::milliseconds limit,
                const OnWait& on_wait = nullptr);

// The same; false, too, where the store is of no use any more.
bool wait_for_keys(c10d::Store& store,
                   const std::vector<std::string>& keys,
                   std::chrono::milliseconds limit);

}  // namespace dpt::c10d_adapter
