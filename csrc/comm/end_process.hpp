// The end of a process that must not go on.
#pragma once

#include <functional>
#include <string>

namespace dpt {

// A program can ask for these in place of its end.
enum class Instead { kRaise, kNothing };

// Prints the reason and, after some seconds in which other threads may still say more, aborts the
// process. Called from the watchdog's thread.
void end_process(const std::string& reason, Instead instead = Instead::kRaise);

// Puts what `explain` says of a failure before it, on a line of its own. The failure stands alone
// if that has nothing to say, or needs longer than a kernel can be made to hold its stream.
std::string begun_with(const std::function<std::string(const std::string&)>& explain,
                       const std::string& failure);

// For tests: called in place of that; nullptr restores it.
void replace_end_process(std::function<void(const std::string& reason)> instead);

}  // namespace dpt
