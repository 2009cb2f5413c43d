// Hooks that the caller of an operation adds to its start.
#pragma once

#include <functional>

#include "base/error.hpp"

namespace dpt::staged {

struct StartHooks {
  // Puts on the operation's stream what is to run at the same time.
  std::function<void()> beside = {};
  // Hears why the start failed before the other ranks can see that it did. So whoever asks those
  // ranks finds the cause, and not only that this rank ended the operation.
  std::function<void(const Error&)> failed = {};
};

}  // namespace dpt::staged
