// The order in which a group's collectives are submitted: the same on every rank.
//
// Locks: whoever submits a collective holds `mutex` until that has its place in the queue. If the
// caller waits, it is held until the operation has ended. It is the outermost lock of the
// communicator: the group's state and its progress are locked inside it, never the other way
// round. It is left before the delegate is started.
#pragma once

#include <cstdint>
#include <mutex>

namespace dpt {

struct SubmitOrder {
  std::mutex mutex;
  uint64_t next_sequence = 1;  // guarded by the mutex
};

}  // namespace dpt
