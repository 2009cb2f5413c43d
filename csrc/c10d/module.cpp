// The Python module deepytorch_c10d: what deepytorch_core.c10d.backend makes process groups with.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend.hpp"
#include "hierarchy.hpp"
#include "in_collective.hpp"
#include "own_client.hpp"
#include "python_bridge.hpp"

namespace py = pybind11;
using dpt::c10d_adapter::Backend;
using dpt::c10d_adapter::BackendPtr;
using dpt::c10d_adapter::GroupSetup;
using dpt::c10d_adapter::Hierarchy;
using dpt::c10d_adapter::Milliseconds;

namespace {

const dpt_api* core_api() {
  const py::capsule capsule = py::module_::import("deepytorch_core._core").attr("dpt_api")();
  const auto* api =
      static_cast<const dpt_api*>(PyCapsule_GetPointer(capsule.ptr(), DPT_API_CAPSULE));
  if (api == nullptr) throw py::error_already_set();
  if (api->abi_version != DPT_ABI_VERSION || api->bytes < sizeof(dpt_api)) {
    throw py::import_error("deepytorch_c10d was built for core ABI " +
                           std::to_string(DPT_ABI_VERSION) + ", the installed core has " +
                           std::to_string(api->abi_version) + ": run `deepytorch build --force`");
  }
  return api;
}

dpt_tune parse_tune(const std::string& name) {
  if (name == "off") return DPT_TUNE_OFF;
  if (name == "auto") return DPT_TUNE_AUTO;
  if (name == "force") return DPT_TUNE_FORCE;
  if (name == "profile") return DPT_TUNE_PROFILE;
  throw py::value_error("tune=\"" + name + "\": expected off, auto, force or profile");
}

// Lends what ProcessGroupGloo's class offers beside c10d's: programs ask a group's backend for it.
void lend_from_gloo(const py::object& backend) {
  const py::module_ c10d = py::module_::import("torch._C._distributed_c10d");
  if (!py::hasattr(c10d, "ProcessGroupGloo")) return;
  const py::object offers = c10d.attr("ProcessGroupGloo").attr("__dict__");
  for (const char* name : {"Device", "_Options", "create_device", "create_default_device"}) {
    if (offers.contains(name)) py::setattr(backend, name, offers[name]);
  }
}

// Called and released with the GIL.
std::shared_ptr<py::object> hold(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            if (!Py_IsInitialized()) return;  // at exit: leak rather than touch a dead interpreter
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

dpt::c10d_adapter::OnWait wrap_on_wait(py::object on_wait) {
  if (on_wait.is_none()) return nullptr;
  return [held = hold(std::move(on_wait))](const std::vector<std::string>& keys,
                                           std::chrono::duration<double> waited) {
    const py::gil_scoped_acquire gil;
    (*held)(keys, waited.count());
  };
}

std::function<std::string(const std::string&)> wrap_explain(py::object explain) {
  if (explain.is_none()) return nullptr;
  return [held = hold(std::move(explain))](const std::string& failure) -> std::string {
    if (!Py_IsInitialized()) return "";
    const py::gil_scoped_acquire gil;
    try {
      return (*held)(failure).cast<std::string>();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("explaining a failed collective");
      return "";
    }
  };
}

std::function<void(const std::string&)> wrap_compare(py::object compare) {
  if (compare.is_none()) return nullptr;
  return [held = hold(std::move(compare))](const std::string& call) {
    const py::gil_scoped_acquire gil;
    (*held)(call);
  };
}

std::function<void()> wrap_closed(py::object closed) {
  if (closed.is_none()) return nullptr;
  return [held = hold(std::move(closed))] {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    try {
      (*held)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("ending a process group");
    }
  };
}

std::function<std::string(const at::Tensor&)> wrap_inspect(py::object inspect) {
  if (inspect.is_none()) return nullptr;
  return [held = hold(std::move(inspect))](const at::Tensor& tensor) {
    const py::gil_scoped_acquire gil;
    return (*held)(tensor).cast<std::string>();
  };
}

GroupSetup::DeviceMemory wrap_memory(py::object memory) {
  if (memory.is_none()) return {};
  const auto held = hold(std::move(memory));
  return {[held] {
            const py::gil_scoped_acquire gil;
            return held->attr("is_there")().cast<bool>();
          },
          [held](int64_t size, at::ScalarType dtype, at::Device device) {
            const py::gil_scoped_acquire gil;
            return held->attr("allocate")(size, dtype, device).cast<at::Tensor>();
          }};
}

// A factory that knows nothing of deaths, or fails to find out, says nothing.
std::function<std::string()> who_died(py::object factory) {
  return [held = hold(std::move(factory))]() -> std::string {
    if (!Py_IsInitialized()) return "";
    const py::gil_scoped_acquire gil;
    if (!py::hasattr(*held, "who_died")) return "";
    try {
      return held->attr("who_died")().cast<std::string>();
    } catch (const py::error_already_set&) {
      return "";
    }
  };
}

// A Python factory of stock backends.
template <typename... Arguments>
std::function<BackendPtr(Arguments...)> wrap_factory(py::object factory) {
  return [held = hold(std::move(factory))](Arguments... arguments) {
    const py::gil_scoped_acquire gil;
    return (*held)(arguments...).template cast<BackendPtr>();
  };
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The c10d backend of deepytorch.";
  m.attr("abi_version") = DPT_ABI_VERSION;
  // Registers the base classes that the bindings below derive from.
  py::module_::import("torch._C._distributed_c10d");

  py::module_::import("atexit").attr("register")(py::cpp_function(&Backend::finish_all));

  m.def("exposed_s",
        &dpt::c10d_adapter::exposed_s,
        "Seconds that the program's threads spent in collectives on host memory.");
  m.def("step_ended",
        &dpt::c10d_adapter::step_ended,
        "Says that a step of the optimizer is over: what it waited for through futures counts.");
  m.def("failures",
        &dpt::c10d_adapter::failures,
        "How many operations of this process ended in an error.");
  m.def("given_bytes",
        &dpt::c10d_adapter::given_bytes,
        "Bytes that this process gave to operations with other ranks, or took from them where it "
        "gave none; one element is left out, as of a loss or a count.");

  m.def("set_library_folders",
        &dpt::c10d_adapter::set_library_folders,
        py::arg("folders"),
        "Says below which folders lies no code of the user's own, for the calling lines in the "
        "flight record.");

  m.def(
      "own_client",
      [](const c10::intrusive_ptr<c10d::Store>& store, py::object on_wait) {
        auto wrapped = wrap_on_wait(std::move(on_wait));
        const py::gil_scoped_release no_gil;  // it connects
        return dpt::c10d_adapter::own_client(store, std::move(wrapped));
      },
      py::arg("store"),
      py::arg("on_wait") = py::none(),
      "The same keys as in `store` over a client of this process's groups, in which no thread "
      "waits for another. Who waits calls `on_wait(keys, waited_s)` about once a second; what it "
      "raises ends the wait.");

  py::class_<Backend::Options, c10d::Backend::Options, c10::intrusive_ptr<Backend::Options>>(
      m, "Options", "Options of a deepytorch group; pass as pg_options.")
      .def(py::init(
               [](Milliseconds timeout) { return c10::make_intrusive<Backend::Options>(timeout); }),
           py::arg("timeout") = Milliseconds(kBackendDefaultTimeout));

  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>> backend(m, "Backend");
  lend_from_gloo(backend);
  backend.def_property_readonly("options", &Backend::getBackendOptions)
      .def("_set_default_timeout", &Backend::setTimeout, py::arg("timeout"))
      .def("leave", &Backend::leave, "Ends the native part of the group, until `rejoin`.")
      .def("rejoin", &Backend::rejoin, "Makes it again; the ranks meet at the next operation.")
      .def("serve_accelerator_only",
           &Backend::serve_accelerator_only,
           py::arg("device"),
           "Says that no CPU tensors come here: a barrier then waits for `device` too.");

  m.def(
      "create_backend",
      [](const c10::intrusive_ptr<c10d::Store>& store,
         int rank,
         int size,
         Milliseconds timeout,
         const std::string& group_name,
         const std::vector<uint64_t>& global_ranks,
         py::object delegates,
         py::object closed,
         bool native,
         const std::string& name,
         const std::string& tune,
         const std::string& profile,
         size_t staging_bytes,
         bool raise_errors,
         bool delegate_competes,
         bool by_nodes,
         py::object explain,
         py::object compare,
         py::object inspect,
         py::object device_memory) {
        auto options = c10::make_intrusive<Backend::Options>(timeout, name);
        options->group_name = group_name;
        options->global_ranks_in_group = global_ranks;
        decltype(GroupSetup::Stock::make_by_nodes) make_by_nodes;
        if (by_nodes) {
          make_by_nodes =
              wrap_factory<const std::string&, const std::vector<int>&>(delegates.attr("by_nodes"));
        }
        GroupSetup setup{.store = store,
                         .rank = rank,
                         .size = size,
                         .options = std::move(options),
                         .api = core_api(),
                         .own_name = name == "deepytorch",
                         .stock = {.make = wrap_factory<const std::string&, double>(delegates),
                                   .make_by_nodes = std::move(make_by_nodes),
                                   .who_died = who_died(delegates),
                                   .competes = delegate_competes},
                         .core = {.native = native,
                                  .tune = parse_tune(tune),
                                  .profile = profile,
                                  .staging_bytes = staging_bytes,
                                  .raise_errors = raise_errors},
                         .hooks = {.explain = wrap_explain(std::move(explain)),
                                   .compare = wrap_compare(std::move(compare)),
                                   .inspect = wrap_inspect(std::move(inspect)),
                                   .closed = wrap_closed(std::move(closed))},
                         .device_memory = wrap_memory(std::move(device_memory))};
        // A store may be Python's, and be asked by a thread of the core meanwhile.
        const py::gil_scoped_release no_gil;
        return c10::make_intrusive<Backend>(std::move(setup));
      },
      py::arg("store"),
      py::arg("rank"),
      py::arg("size"),
      py::kw_only(),
      py::arg("timeout"),
      py::arg("group_name"),
      py::arg("global_ranks"),
      py::arg("delegates"),
      py::arg("closed") = py::none(),
      py::arg("native") = true,
      py::arg("name") = "deepytorch",
      py::arg("tune") = "off",
      py::arg("profile") = "",
      py::arg("staging_bytes") = 0,
      py::arg("raise_errors") = false,
      py::arg("delegate_competes") = false,
      py::arg("by_nodes") = false,
      py::arg("explain") = py::none(),
      py::arg("compare") = py::none(),
      py::arg("inspect") = py::none(),
      py::arg("device_memory") = py::none(),
      "A process group's backend; `delegates(device_type)` makes the stock one when needed, and "
      "`delegates.by_nodes(device_type, node_of)` one that goes through nodes in stages; "
      "`closed()` is called when the group has ended.");

  py::class_<Hierarchy, c10d::Backend, c10::intrusive_ptr<Hierarchy>>(m, "Hierarchy")
      .def(py::init([](int rank,
                       BackendPtr flat,
                       BackendPtr local,
                       BackendPtr rail,
                       std::vector<int> node_of,
                       size_t piece_bytes) {
             return c10::make_intrusive<Hierarchy>(Hierarchy::Setup{rank,
                                                                    std::move(flat),
                                                                    std::move(local),
                                                                    std::move(rail),
                                                                    std::move(node_of),
                                                                    piece_bytes,
                                                                    core_api()});
           }),
           py::arg("rank"),
           py::kw_only(),
           py::arg("flat"),
           py::arg("local"),
           py::arg("rail"),
           py::arg("node_of"),
           py::arg("piece_bytes"),
           "Collectives in stages on a node's ranks and on those of one place on each node.");
}
