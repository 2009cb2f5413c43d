// Wakes a thread that waits in poll or epoll: any thread may, and the waiting one takes note.
#pragma once

#include "base/unique_fd.hpp"

namespace dpt {

class Waker {
 public:
  // Wakes nobody, and has no descriptor.
  Waker() = default;

  // An eventfd, or a pipe where a container's profile denies those. Throws Error(DPT_ERR_SYSTEM).
  static Waker make();

  // Becomes readable with `wake`; -1 without one.
  int fd() const { return read_.get(); }
  void wake() const;
  // Takes note of all wakes so far.
  void clear() const;
  void reset();

 private:
  UniqueFd read_;
  UniqueFd write_;  // of a pipe
};

}  // namespace dpt
