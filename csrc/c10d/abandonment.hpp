// The end of stock backends whose operations on a device wait for a lost rank. Aborting them lets
// the streams go on, and with them a thread that is held up by a full queue, and the process's end.
#pragma once

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace dpt::c10d_adapter {

class Abandonment {
 public:
  // Aborts them in a thread of its own, as it takes a while; once. First it waits a moment as long
  // as `is_starting`: a call inside such a backend is better off when it returns before that.
  void begin(std::vector<c10::intrusive_ptr<c10d::Backend>> backends,
             std::function<bool()> is_starting);
  // Whether it was begun; then waits for its end, though not for ever. Nothing of `is_starting` is
  // used any more.
  bool settle() const;

 private:
  struct State;
  std::shared_ptr<State> state_ = make_state();
  static std::shared_ptr<State> make_state();
};

}  // namespace dpt::c10d_adapter
