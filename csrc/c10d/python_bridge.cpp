#include "python_bridge.hpp"

#include <torch/csrc/utils/pybind.h>

namespace dpt::c10d_adapter {

std::exception_ptr run_signal_handlers() {
  if (!Py_IsInitialized()) return nullptr;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return nullptr;
  return std::make_exception_ptr(pybind11::error_already_set());
}

void without_gil(const std::function<void()>& function) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    const pybind11::gil_scoped_release no_gil;
    function();
  } else {
    function();
  }
}

}  // namespace dpt::c10d_adapter
