// reduce() of slots that a device's copy engines write and read.
#pragma once

#include "host/reduce.hpp"

namespace dpt {

// The same result as reduce(), bit for bit. `destination` is on a boundary of 16 bytes, and there
// are no copies. Who is told of the end afterwards sees all of it.
void reduce_for_device(const ReduceArgs& args);

}  // namespace dpt
