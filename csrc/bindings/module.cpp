// The Python module deepytorch_core._core; its typed face is deepytorch_core/_core.pyi.
#include <pybind11/pybind11.h>

#include "base/env.hpp"
#include "base/log.hpp"
#include "bindings/register.hpp"
#include "deepytorch.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "The torch-free core of deepytorch.";
  m.attr("__version__") = DPT_VERSION;
  m.attr("abi_version") = DPT_ABI_VERSION;
  // As CMake writes them, "80-real 90a-real 90-virtual"; "" without GPU kernels.
  m.attr("gpu_architectures") = DPT_GPU_ARCHITECTURES;
  // Python's stderr at its start tells whether the process was given one.
  if (pybind11::module_::import("sys").attr("__stderr__").is_none()) dpt::silence_log();
  m.def("set_variable",
        &dpt::set_variable,
        pybind11::arg("name"),
        pybind11::arg("value"),
        "Sets a variable in place of the environment's, before anything has read that.");
  dpt::register_comm(m);
  dpt::register_communicator(m);
  dpt::register_topology(m);
  dpt::register_host(m);
  dpt::register_device_memory(m);
}
