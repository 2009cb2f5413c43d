// Random bytes that nobody can guess, for names and secrets.
#pragma once

#include <cstddef>

namespace dpt {

// From getrandom, or /dev/urandom where a container's profile denies that. Throws
// Error(DPT_ERR_SYSTEM).
void fill_random(void* bytes, size_t count);

}  // namespace dpt
