// memcpy for staging copies: never past the cache, as libc's does with long ones, because a peer is
// about to read the slot from there.
#pragma once

#include <cstddef>

namespace dpt {

void copy(void* destination, const void* source, size_t bytes);

}  // namespace dpt
