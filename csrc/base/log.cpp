#include "base/log.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <ctime>

#include "base/env.hpp"

namespace dpt {
namespace {

std::atomic<bool> silent{false};

// While it lives, a pipe that nobody reads is an error of write() alone. Otherwise SIGPIPE would
// end a program that does not ignore it, or call the program's own handler.
class WithoutBrokenPipe {
 public:
  WithoutBrokenPipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~WithoutBrokenPipe() {
    constexpr timespec kNow{};
    if (!was_pending_) {
      while (sigtimedwait(&pipe_, nullptr, &kNow) < 0 && errno == EINTR) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutBrokenPipe(const WithoutBrokenPipe&) = delete;
  WithoutBrokenPipe& operator=(const WithoutBrokenPipe&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
  bool was_pending_;
};

}  // namespace

void write_to_stderr(const std::string& text) {
  if (silent.load(std::memory_order_relaxed)) return;
  const int kept = errno;
  const WithoutBrokenPipe guard;
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      silent = true;  // closed, full or read by nobody
      break;
    }
    done += static_cast<size_t>(written);
  }
  errno = kept;
}

void silence_log() { silent = true; }

void log(LogLevel level, const std::string& message) {
  if (level < env().log_level) return;
  std::string line = "deepytorch: ";
  if (env().log_level == LogLevel::kDebug) line += "[pid " + std::to_string(getpid()) + "] ";
  if (level == LogLevel::kWarning) line += "warning: ";
  if (level == LogLevel::kError) line += "error: ";
  // One write, so that lines of several ranks do not mix.
  write_to_stderr(line + message + "\n");
}

}  // namespace dpt
