// The order in which a group's collectives are submitted: the same on every rank.
//
// Locks: `mutex` is held by whoever submits a collective, from when it is looked at until it has
// its place; in a synchronous one until that has ended. It is the outermost lock of the
// communicator: a group's state, messages and progress thread are locked inside it, never the
// other way round.
#pragma once

#include <cstdint>
#include <mutex>

namespace dpt {

struct SubmitOrder {
  std::mutex mutex;
  uint64_t next_sequence = 1;  // guarded by the mutex
};

}  // namespace dpt
