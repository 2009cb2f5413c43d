#include <pybind11/pybind11.h>

#include "bindings/register.hpp"
#include "comm/c_api.hpp"
#include "comm/statistics.hpp"

namespace py = pybind11;

namespace dpt {

void register_comm(py::module_& m) {
  m.def(
      "dpt_api",
      [] { return py::capsule(api(), DPT_API_CAPSULE); },
      "The C ABI's function table, for the c10d adapter.");
  m.def(
      "statistics",
      [] {
        py::list rows;
        for (const StatisticsRow& row : all_statistics()) {
          py::dict entry;
          entry["group"] = row.group;
          entry["op"] = name_of(row.collective);
          entry["algorithm"] = row.algorithm;
          entry["reason"] = row.reason;
          entry["calls"] = row.calls;
          entry["bytes"] = row.bytes;
          entry["time_us"] = row.time_us;
          rows.append(entry);
        }
        return rows;
      },
      "What every group of this process did: one row per group, op, algorithm and reason.");
  m.def("reset_statistics", &reset_statistics, "Forgets all counts.");
}

}  // namespace dpt
