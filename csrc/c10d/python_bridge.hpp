// The few things for which the adapter needs Python; the only header of the adapter, besides the
// module itself, whose implementation includes Python.h.
#pragma once

#include <c10/util/FunctionRef.h>

#include <exception>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace dpt::c10d_adapter {

// Runs pending Python signal handlers; returns what they raised (KeyboardInterrupt), or nullptr.
// Works with and without the GIL held.
std::exception_ptr run_signal_handlers();

// Whether the program handles signals that people send itself. Such a handler may start operations
// of the group that this thread waits for, or destroy the group. So nothing of the core may be
// beneath the handler. Half a microsecond.
bool handles_signals();

// A line of the program.
struct CodeLine {
  std::string file;
  std::string function;
  int line = 0;
};
// Code below these folders is no user's, as deepytorch_core/hang/stacks.py has it.
void set_library_folders(std::vector<std::string> folders);
// Returns the innermost line of the user's own code that this thread is in, else of a library's
// other than torch and ours. It returns nothing for a thread that runs no Python, or when the
// interpreter is ending. The search runs no Python and keeps nothing alive. It may wait for the
// GIL, so holds no lock of the core's.
std::optional<CodeLine> find_calling_line();

// Calls `function` with the GIL released, if this thread holds it.
void without_gil(c10::function_ref<void()> function);

}  // namespace dpt::c10d_adapter
