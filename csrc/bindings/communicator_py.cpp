// Collectives of plain buffers, for frameworks other than torch: the C ABI with Python's buffer
// protocol. There is no stock backend behind these groups.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/wait.hpp"
#include "bindings/buffer.hpp"
#include "bindings/register.hpp"
#include "comm/c_api.hpp"

namespace dpt {
namespace {

namespace py = pybind11;

// A signal handler raised this inside a wait of the core; picked up once that has returned.
thread_local std::exception_ptr pending_signal;

// Calls `function` with the GIL and turns what it raises into a status.
template <typename Function>
dpt_status with_python(dpt_error* error, Function&& function) {
  const py::gil_scoped_acquire gil;
  try {
    return function();
  } catch (const std::exception& caught) {
    // Python's exceptions have their traceback behind the first line.
    const std::string text = caught.what();
    set_message(error, text.substr(0, text.find('\n')).c_str());
    return DPT_ERR_SYSTEM;
  }
}

dpt_status store_set(
    void* context, const char* key, const void* data, size_t bytes, dpt_error* error) {
  return with_python(error, [&] {
    static_cast<py::object*>(context)->attr("set")(
        key, py::bytes(static_cast<const char*>(data), bytes));
    return DPT_OK;
  });
}

dpt_status store_get(void* context,
                     const char* key,
                     int64_t timeout_ms,
                     void* data,
                     size_t capacity,
                     size_t* bytes,
                     dpt_error* error) {
  return with_python(error, [&] {
    const py::object found = static_cast<py::object*>(context)->attr("get")(key, timeout_ms);
    if (found.is_none()) return DPT_ERR_TIMEOUT;
    const auto value = found.cast<std::string>();
    *bytes = value.size();
    std::memcpy(data, value.data(), std::min(capacity, value.size()));
    return DPT_OK;
  });
}

dpt_status no_delegate(void*, void*, dpt_error* error) {
  set_message(error,
              "native code can't serve this group, and there is no other: all ranks must run on "
              "one node and share memory; deepytorch.report() says what is in the way");
  return DPT_ERR_DELEGATE;
}

int poll_signals(void*) {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return 0;
  pending_signal = std::make_exception_ptr(py::error_already_set());
  return 1;
}

dpt_tune parse_tune(const std::string& name) {
  if (name == "off") return DPT_TUNE_OFF;
  if (name == "auto") return DPT_TUNE_AUTO;
  if (name == "force") return DPT_TUNE_FORCE;
  if (name == "profile") return DPT_TUNE_PROFILE;
  throw py::value_error("tune=\"" + name + "\": expected off, auto, force or profile");
}

[[noreturn]] void raise(dpt_status status, const char* message) {
  if (status == DPT_ERR_INTERRUPTED && pending_signal) {
    std::rethrow_exception(std::exchange(pending_signal, nullptr));
  }
  if (status == DPT_ERR_INVALID) throw py::value_error(message);
  throw std::runtime_error(message);
}

class PyCommunicator {
 public:
  struct Settings {
    std::string name;
    double timeout_s;
    std::string tune;
    std::string profile;
    size_t staging_bytes;
  };

  PyCommunicator(py::object store, int rank, int size, const Settings& settings)
      : store_(std::move(store)),
        rank_(rank),
        size_(size),
        timeout_ms_(static_cast<int64_t>(
            std::min(settings.timeout_s * 1e3, static_cast<double>(kLongestWait.count())))) {
    if (size < 1 || rank < 0 || rank >= size) {
      throw py::value_error("rank " + std::to_string(rank) + " of " + std::to_string(size));
    }
    std::vector<int64_t> global_ranks;
    for (int other = 0; other < size; ++other) global_ranks.push_back(other);
    const dpt_comm_options options{.group_name = settings.name.c_str(),
                                   .rank = rank,
                                   .size = size,
                                   .global_ranks = global_ranks.data(),
                                   .native = 1,
                                   .interrupted = poll_signals,
                                   .interrupted_context = nullptr,
                                   .tune = parse_tune(settings.tune),
                                   .profile = settings.profile.c_str(),
                                   .staging_bytes = settings.staging_bytes};
    const dpt_store table{&store_, store_set, store_get};
    const dpt_delegate delegate{nullptr, no_delegate, no_delegate, nullptr, nullptr, nullptr};
    dpt_error error{};
    dpt_status status = DPT_OK;
    {
      // A thread of the core may be asking the store meanwhile.
      const py::gil_scoped_release release;
      status = api()->comm_create(&options, &table, &delegate, &comm_, &error);
    }
    if (status != DPT_OK) raise(status, error.message);
  }
  ~PyCommunicator() { close(); }
  PyCommunicator(const PyCommunicator&) = delete;
  PyCommunicator& operator=(const PyCommunicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  void all_reduce(const std::string& dtype_name,
                  const std::string& op_name,
                  const py::object& input,
                  const py::object& output) {
    const DataType dtype = parse_dtype(dtype_name);
    const Buffer from(input, PyBUF_SIMPLE);
    const Buffer to(output, PyBUF_WRITABLE);
    if (from.bytes() != to.bytes()) {
      throw py::value_error("all_reduce: the input has " + std::to_string(from.bytes()) +
                            " bytes, the output " + std::to_string(to.bytes()));
    }
    const void* const source = from.data();
    void* const target = to.data();
    submit({.collective = DPT_ALL_REDUCE,
            .dtype = dtype,
            .reduce_op = parse_op(op_name),
            .inputs = &source,
            .outputs = &target,
            .count = elements(from, dtype)});
  }

  void all_gather(const std::string& dtype_name,
                  const py::object& input,
                  const std::vector<py::object>& outputs) {
    const DataType dtype = parse_dtype(dtype_name);
    if (outputs.size() != static_cast<size_t>(size_)) {
      throw py::value_error("all_gather needs one output per rank (" + std::to_string(size_) +
                            "), got " + std::to_string(outputs.size()));
    }
    const Buffer from(input, PyBUF_SIMPLE);
    std::list<Buffer> held;
    std::vector<void*> targets;
    std::vector<size_t> counts;
    for (const py::object& output : outputs) {
      held.emplace_back(output, PyBUF_WRITABLE);
      targets.push_back(held.back().data());
      counts.push_back(elements(held.back(), dtype));
    }
    const void* const source = from.data();
    const size_t count = elements(from, dtype);
    if (counts[rank_] != count) {
      throw py::value_error("all_gather: this rank's output has " + std::to_string(counts[rank_]) +
                            " elements, its input " + std::to_string(count));
    }
    submit({.collective = DPT_ALL_GATHER,
            .dtype = dtype,
            .reduce_op = DPT_NO_REDUCE,
            .inputs = &source,
            .outputs = targets.data(),
            .count = count,
            .output_counts = counts.data()});
  }

  void broadcast(const std::string& dtype_name, const py::object& buffer, int root) {
    if (root < 0 || root >= size_) {
      throw py::value_error("broadcast: root " + std::to_string(root) + " of " +
                            std::to_string(size_) + " ranks");
    }
    const DataType dtype = parse_dtype(dtype_name);
    const Buffer both(buffer, PyBUF_WRITABLE);
    void* const target = both.data();
    const void* const source = target;
    submit({.collective = DPT_BROADCAST,
            .dtype = dtype,
            .reduce_op = DPT_NO_REDUCE,
            .root = root,
            .inputs = &source,
            .outputs = &target,
            .count = elements(both, dtype)});
  }

  void barrier() { submit({.collective = DPT_BARRIER, .reduce_op = DPT_NO_REDUCE}); }

  void close() {
    dpt_comm* const comm = std::exchange(comm_, nullptr);
    if (comm == nullptr) return;
    const py::gil_scoped_release release;
    api()->comm_destroy(comm);
  }

 private:
  static size_t elements(const Buffer& buffer, DataType dtype) {
    if (buffer.bytes() % size_of(dtype) != 0) {
      throw py::value_error(std::to_string(buffer.bytes()) + " bytes are no whole number of " +
                            name_of(dtype) + " elements");
    }
    return buffer.bytes() / size_of(dtype);
  }

  void submit(dpt_request request) {
    if (comm_ == nullptr) throw std::runtime_error("the communicator was closed");
    request.premul_factor = 1;
    request.timeout_ms = timeout_ms_;
    dpt_outcome outcome = DPT_COMPLETED;
    dpt_error error{};
    dpt_status status = DPT_OK;
    {
      const py::gil_scoped_release release;
      // Nothing is asynchronous here, so no callback is ever made.
      status = api()->submit(comm_, &request, nullptr, nullptr, &outcome, &error);
    }
    if (status != DPT_OK) raise(status, error.message);
  }

  py::object store_;
  int rank_;
  int size_;
  int64_t timeout_ms_;
  dpt_comm* comm_ = nullptr;
};

}  // namespace

void register_communicator(py::module_& m) {
  py::class_<PyCommunicator>(
      m,
      "Communicator",
      "Collectives of plain buffers among the processes of one node. `store` has set(key, bytes)\n"
      "and get(key, timeout_ms), which returns None when the key does not come. Ranks meet at the\n"
      "first operation. Operations block, with the GIL released; RuntimeError when one fails.")
      .def(py::init([](py::object store,
                       int rank,
                       int size,
                       const std::string& name,
                       double timeout_s,
                       const std::string& tune,
                       const std::string& profile,
                       size_t staging_bytes) {
             return std::make_unique<PyCommunicator>(
                 std::move(store),
                 rank,
                 size,
                 PyCommunicator::Settings{name, timeout_s, tune, profile, staging_bytes});
           }),
           py::arg("store"),
           py::arg("rank"),
           py::arg("size"),
           py::kw_only(),
           py::arg("name"),
           py::arg("timeout_s") = 1800.0,
           py::arg("tune") = "off",
           py::arg("profile") = "",
           py::arg("staging_bytes") = 0)
      .def_property_readonly("rank", &PyCommunicator::rank)
      .def_property_readonly("size", &PyCommunicator::size)
      .def("all_reduce",
           &PyCommunicator::all_reduce,
           py::arg("dtype"),
           py::arg("op"),
           py::arg("input"),
           py::arg("output"),
           "Reduces all ranks' inputs into every rank's output, which may be the input.")
      .def("all_gather",
           &PyCommunicator::all_gather,
           py::arg("dtype"),
           py::arg("input"),
           py::arg("outputs"),
           "Gives every rank all inputs, by rank; each output has the size of that rank's input.")
      .def("broadcast",
           &PyCommunicator::broadcast,
           py::arg("dtype"),
           py::arg("buffer"),
           py::arg("root"),
           "Gives every rank the root's buffer.")
      .def("barrier", &PyCommunicator::barrier, "Waits for all ranks.")
      .def("close", &PyCommunicator::close, "Leaves the group; later operations are errors.");
}

}  // namespace dpt
