#include "base/log.hpp"

#include <unistd.h>

#include <cstdio>

#include "base/env.hpp"

namespace dpt {

void log(LogLevel level, const std::string& message) {
  if (level < env().log_level) return;
  std::string line = "deepytorch: ";
  if (env().log_level == LogLevel::kDebug) line += "[pid " + std::to_string(getpid()) + "] ";
  if (level == LogLevel::kWarning) line += "warning: ";
  if (level == LogLevel::kError) line += "error: ";
  line += message + "\n";
  // One write, so that lines of several ranks do not mix.
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace dpt
