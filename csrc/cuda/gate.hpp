// A kernel that holds up its stream until the host lets go. So the work queued behind it runs back
// to back, however long the host took to queue it.
#pragma once

#include <cstdint>

#include "cuda/arguments.hpp"

namespace dpt::cuda {

// Makes the stream wait until `*word`, host memory that the device reads, is `ticket`; at most for
// `timeout_ns`.
void start_gate(Stream stream, const uint32_t* word, uint32_t ticket, uint64_t timeout_ns);

}  // namespace dpt::cuda
