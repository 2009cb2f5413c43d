// One line per message on stderr, "deepytorch: ..." with the process id at debug level.
#pragma once

#include <string>

namespace dpt {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

void log(LogLevel level, const std::string& message);

}  // namespace dpt
