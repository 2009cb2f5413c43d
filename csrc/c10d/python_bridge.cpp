#include "python_bridge.hpp"

#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <csignal>
#include <vector>

namespace dpt::c10d_adapter {
namespace {

struct SignalModule {
  // What the module "signal" makes its functions of: those are Python's, and ten times as slow.
  pybind11::module_ signals = pybind11::module_::import("_signal");
  pybind11::object get = signals.attr("getsignal");
  pybind11::object interrupt = signals.attr("default_int_handler");
  std::vector<pybind11::int_> numbers{SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM};
};

}  // namespace

std::exception_ptr run_signal_handlers() {
  if (!Py_IsInitialized()) return nullptr;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return nullptr;
  return std::make_exception_ptr(pybind11::error_already_set());
}

bool handles_signals() {
  if (!Py_IsInitialized()) return false;
  const pybind11::gil_scoped_acquire gil;
  PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<SignalModule> storage;
  const SignalModule& module =
      storage.call_once_and_store_result([] { return SignalModule(); }).get_stored();
  return std::any_of(module.numbers.begin(), module.numbers.end(), [&](const auto& number) {
    const pybind11::object handler = module.get(number);
    return PyCallable_Check(handler.ptr()) != 0 && !handler.is(module.interrupt);
  });
}

void without_gil(c10::function_ref<void()> function) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    const pybind11::gil_scoped_release no_gil;
    function();
  } else {
    function();
  }
}

}  // namespace dpt::c10d_adapter
