// How to carry out an operation on a stock backend.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>
#include <type_traits>
#include <utility>

namespace dpt::c10d_adapter {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A function and the arguments of c10d's call, which are the caller's. No list is copied, because
// each copy takes time that shows, and on an accelerator all is said when that call returns.
class Replay {
 public:
  virtual ~Replay() = default;
  virtual WorkPtr on(c10d::Backend& stock) const = 0;
  // One with arguments of its own, for what outlives the call.
  virtual std::unique_ptr<Replay> keep() const = 0;
};

template <typename Function, typename... Arguments>
class ReplayOf final : public Replay {
 public:
  explicit ReplayOf(Function function, Arguments... arguments)
      : function_(std::move(function)), arguments_(arguments...) {}

  WorkPtr on(c10d::Backend& stock) const override {
    return std::apply([&](auto&... arguments) { return function_(stock, arguments...); },
                      arguments_);
  }

  std::unique_ptr<Replay> keep() const override {
    using Kept = ReplayOf<Function, std::decay_t<Arguments>...>;
    return std::apply(
        [&](auto&... arguments) { return std::make_unique<Kept>(function_, arguments...); },
        arguments_);
  }

 private:
  Function function_;
  mutable std::tuple<Arguments...> arguments_;  // c10d's calls take lists that they may change
};

// `function(stock, arguments...)`, for an expression that ends before the arguments do.
template <typename Function, typename... Arguments>
ReplayOf<Function, Arguments&...> replaying(Function function, Arguments&... arguments) {
  return ReplayOf<Function, Arguments&...>(std::move(function), arguments...);
}

}  // namespace dpt::c10d_adapter
