// Python objects as plain memory, and the core's names for what is in it.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "base/types.hpp"

namespace dpt {

// A contiguous buffer of any Python object, held while this lives.
class Buffer {
 public:
  // `flags`: PyBUF_SIMPLE to read, PyBUF_WRITABLE to write.
  Buffer(const pybind11::object& object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw pybind11::error_already_set();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return view_.buf; }
  size_t bytes() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

template <typename Enum>
Enum parse_name(const std::string& name, Enum last, const char* what) {
  std::string names;
  for (int i = 0; i <= last; ++i) {
    const auto value = static_cast<Enum>(i);
    if (name == name_of(value)) return value;
    names += std::string(" ") + name_of(value);
  }
  throw pybind11::value_error("no " + std::string(what) + " \"" + name + "\"; known:" + names);
}

inline DataType parse_dtype(const std::string& name) {
  return parse_name(name, DPT_COMPLEX128, "dtype");
}
inline ReduceOp parse_op(const std::string& name) {
  return parse_name(name, DPT_BXOR, "reduce op");
}

}  // namespace dpt
