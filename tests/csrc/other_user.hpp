// A process of its own, of this user or of another.
#pragma once

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <functional>

#include "base/error.hpp"

namespace dpt::testing {

constexpr uid_t kNobody = 65534;

// A process that does `work` as user `uid`; its end is waited for.
class Other {
 public:
  Other(uid_t uid, const std::function<bool()>& work) {
    pid_ = DPT_SYS_CHECK(fork());
    if (pid_ > 0) return;
    bool done = false;
    try {
      // The system call itself: the C library would ask all threads, which a child has not.
      done = syscall(SYS_setresuid, uid, uid, uid) == 0 && work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "the other process: %s\n", error.what());
    }
    _exit(done ? 0 : 1);
  }
  ~Other() {
    if (pid_ > 0) finished();
  }
  bool finished() {
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

 private:
  pid_t pid_;
};

}  // namespace dpt::testing
