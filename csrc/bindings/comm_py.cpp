#include <pybind11/pybind11.h>

#include "bindings/register.hpp"
#include "comm/c_api.hpp"
#include "comm/fabric.hpp"
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
  m.def(
      "is_registered",
      [](uintptr_t address, size_t bytes) {
        const MemoryPool& pool = Fabric::instance().memory();
        return pool.offset_of(reinterpret_cast<const void*>(address), bytes).has_value();
      },
      py::arg("address"),
      py::arg("bytes"),
      "Whether [address, address + bytes) lies in this process's registered memory.");
  m.def(
      "registered_memory",
      [] {
        const MemoryPool::Usage usage = Fabric::instance().memory().usage();
        py::dict result;
        result["in_use_bytes"] = usage.in_use_bytes;
        result["reserved_bytes"] = usage.reserved_bytes;
        return result;
      },
      "Bytes of registered memory: handed out now, and the most the pool ever spanned.");
  m.def(
      "trim_registered_memory",
      [] { return Fabric::instance().memory().trim(); },
      "Gives free registered memory back to the system; returns the bytes.");
  m.def("reset_statistics", &reset_statistics, "Forgets all counts.");
}

}  // namespace dpt
