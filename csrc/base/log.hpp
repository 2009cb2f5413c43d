// One line per message on stderr, "deepytorch: ..." with the process id at debug level. Where
// stderr can't be written nothing more is tried.
#pragma once

#include <string>

namespace dpt {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

void log(LogLevel level, const std::string& message);

// As it is, at every level.
void write_to_stderr(const std::string& text);

// For a process that was started without a stderr: the number may be another file's by now.
void silence_log();

}  // namespace dpt
