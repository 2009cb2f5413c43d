#include "comm/transports.hpp"

namespace dpt {
namespace {

// From here on ranks that share cores sleep instead of yielding.
constexpr size_t kLongMessage = 8 << 20;
// Between nodes from here on waits are too long to spin through.
constexpr size_t kLongBetweenNodes = 64 << 10;

}  // namespace

WaitStyle Transports::wait_style(size_t bytes, bool in_caller) const {
  if (!in_caller) return WaitStyle::kBackground;
  if (nodes && bytes > kLongBetweenNodes) return WaitStyle::kBackground;
  if (!oversubscribed) return WaitStyle::kOwnCore;
  // Long steps: the peers copy for a while, so sleeping costs less than handing the core around.
  return bytes > kLongMessage ? WaitStyle::kBackground : WaitStyle::kSharedCore;
}

}  // namespace dpt
