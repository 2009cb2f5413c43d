#include "base/waker.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "base/error.hpp"

namespace dpt {

Waker Waker::make() {
  Waker waker;
  waker.read_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (waker.read_.get() >= 0) return waker;
  int ends[2];
  DPT_SYS_CHECK(pipe2(ends, O_CLOEXEC | O_NONBLOCK));
  waker.read_ = UniqueFd(ends[0]);
  waker.write_ = UniqueFd(ends[1]);
  return waker;
}

void Waker::wake() const {
  // A full pipe wakes as well.
  const uint64_t one = 1;
  const int fd = write_.get() >= 0 ? write_.get() : read_.get();
  [[maybe_unused]] const ssize_t written = write(fd, &one, sizeof one);
}

void Waker::clear() const {
  uint64_t count = 0;
  while (read(read_.get(), &count, sizeof count) > 0) {
  }
}

void Waker::reset() {
  read_.reset();
  write_.reset();
}

}  // namespace dpt
