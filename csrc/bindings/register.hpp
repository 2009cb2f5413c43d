#pragma once

#include <pybind11/pybind11.h>

namespace dpt {

void register_comm(pybind11::module_& m);
void register_communicator(pybind11::module_& m);
void register_topology(pybind11::module_& m);
void register_device_memory(pybind11::module_& m);
void register_host(pybind11::module_& m);

}  // namespace dpt
