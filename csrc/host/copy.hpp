// memcpy for staging copies: regular stores, because libc's switch to non-temporal ones for large
// copies sends staging slots to memory that a peer is about to read from the cache.
#pragma once

#include <cstddef>

namespace dpt {

void copy(void* destination, const void* source, size_t bytes);

}  // namespace dpt
