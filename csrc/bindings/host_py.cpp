// Reductions of plain buffers: for tests and benchmarks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <list>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "bindings/buffer.hpp"
#include "bindings/register.hpp"
#include "host/reduce.hpp"

namespace dpt {
namespace {

namespace py = pybind11;

void expect_bytes(const std::string& which, size_t found, size_t expected) {
  if (found == expected) return;
  throw py::value_error(which + " has " + std::to_string(found) + " bytes, the destination has " +
                        std::to_string(expected));
}

void reduce_buffers(const std::string& dtype_name,
                    const std::string& op_name,
                    const std::vector<py::object>& sources,
                    const py::object& destination,
                    const std::vector<double>& factors,
                    const py::object& second_destination) {
  const DataType dtype = parse_dtype(dtype_name);
  const ReduceOp op = parse_op(op_name);
  const Buffer output(destination, PyBUF_WRITABLE);
  if (output.bytes() % size_of(dtype) != 0) {
    throw py::value_error("the destination's " + std::to_string(output.bytes()) +
                          " bytes are no whole number of " + dtype_name + " elements");
  }
  std::optional<Buffer> second_output;
  if (!second_destination.is_none()) {
    second_output.emplace(second_destination, PyBUF_WRITABLE);
    expect_bytes("the second destination", second_output->bytes(), output.bytes());
  }
  if (op == DPT_PREMUL_SUM && factors.size() != sources.size()) {
    throw py::value_error("premul_sum of " + std::to_string(sources.size()) +
                          " sources needs as many factors, found " +
                          std::to_string(factors.size()));
  }
  std::list<Buffer> inputs;
  std::vector<const void*> pointers;
  for (const py::object& source : sources) {
    inputs.emplace_back(source, PyBUF_SIMPLE);
    expect_bytes(
        "source " + std::to_string(pointers.size()), inputs.back().bytes(), output.bytes());
    pointers.push_back(inputs.back().data());
  }
  void* const second = second_output ? second_output->data() : nullptr;
  try {
    const py::gil_scoped_release release;
    reduce({.dtype = dtype,
            .op = op,
            .sources = pointers.data(),
            .num_sources = static_cast<int>(pointers.size()),
            .factors = factors.data(),
            .count = output.bytes() / size_of(dtype),
            .destination = output.data(),
            .copies = &second,
            .num_copies = second_output ? 1 : 0});
  } catch (const Error& error) {
    throw py::value_error(error.what());
  }
}

std::string limit_isa(const std::string& isa) {
  try {
    return limit_reduce_isa(isa.c_str());
  } catch (const Error& error) {
    throw py::value_error(error.what());
  }
}

}  // namespace

void register_host(py::module_& m) {
  m.def(
      "reduce",
      &reduce_buffers,
      py::arg("dtype"),
      py::arg("op"),
      py::arg("sources"),
      py::arg("destination"),
      py::arg("factors") = std::vector<double>{},
      py::kw_only(),
      py::arg("second_destination") = py::none(),
      "Reduces buffers of equal size, in order; `factors` is for premul_sum. ValueError for sizes\n"
      "that differ and for a pair that can_reduce() refuses.");
  m.def(
      "can_reduce",
      [](const std::string& dtype, const std::string& op) {
        return can_reduce(parse_dtype(dtype), parse_op(op));
      },
      py::arg("dtype"),
      py::arg("op"),
      "Whether the pair has a native reduction.");
  m.def(
      "reduce_isa",
      [] { return std::string(reduce_isa()); },
      "The instruction set that reductions use: avx512, avx2 or portable.");
  m.def("limit_reduce_isa",
        &limit_isa,
        py::arg("isa"),
        "Use no wider instruction set than `isa`, for tests; returns what is used now.");
}

}  // namespace dpt
