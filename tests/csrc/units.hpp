// Sizes in bytes.
#pragma once

#include <cstddef>

namespace dpt {

inline constexpr size_t kKiB = 1 << 10;
inline constexpr size_t kMiB = 1 << 20;

}  // namespace dpt
