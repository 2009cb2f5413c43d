// The few things for which the adapter needs Python; the only header of the adapter, besides the
// module itself, whose implementation includes Python.h.
#pragma once

#include <c10/util/FunctionRef.h>

#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace dpt::c10d_adapter {

// Runs pending Python signal handlers; returns what they raised (KeyboardInterrupt), or nullptr.
// Works with and without the GIL held.
std::exception_ptr run_signal_handlers();

// Whether the program handles signals that people send itself. Such a handler may start operations
// of the group that this thread waits for, or destroy it, so nothing of the core may be beneath it.
// Half a microsecond.
bool handles_signals();

// Calls `function` with the GIL released, if this thread holds it.
void without_gil(c10::function_ref<void()> function);

}  // namespace dpt::c10d_adapter
