#include <pybind11/pybind11.h>

#include "base/error.hpp"
#include "topology/topology.hpp"

namespace dpt {
namespace {

std::string topology_json(const std::string& root) {
  Roots roots;
  roots.sys = root + roots.sys;
  roots.proc = root + roots.proc;
  const pybind11::gil_scoped_release release;
  return dump_topology(discover(roots));
}

std::string normalize_topology_json(const std::string& text) {
  try {
    return dump_topology(load_topology(text));
  } catch (const Error& error) {
    throw pybind11::value_error(error.what());
  }
}

}  // namespace

void register_topology(pybind11::module_& m) {
  m.def("topology_json",
        &topology_json,
        pybind11::kw_only(),
        pybind11::arg("root") = "",
        "This machine as JSON, discovered now; /sys and /proc are read below `root`.");
  m.def("normalize_topology_json",
        &normalize_topology_json,
        pybind11::arg("text"),
        "The same topology as this release writes it; ValueError names a wrong field by its path.");
  m.def(
      "usable_cores",
      [] { return usable_cores(); },
      "CPUs this process may use: its affinity, limited by the cgroup's CPU quota.");
}

}  // namespace dpt
