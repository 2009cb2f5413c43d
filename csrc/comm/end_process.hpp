// The end of a process that must not go on.
#pragma once

#include <functional>
#include <string>

namespace dpt {

// Prints the reason and, after some seconds in which other threads may still say more, aborts the
// process. Called from the watchdog's thread.
void end_process(const std::string& reason);

// For tests: called in place of that; nullptr restores it.
void replace_end_process(std::function<void(const std::string& reason)> instead);

}  // namespace dpt
