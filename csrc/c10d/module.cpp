// The Python module deepytorch_c10d: what deepytorch_core.backend makes process groups with.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend.hpp"

namespace py = pybind11;
using dpt::c10d_adapter::Backend;
using dpt::c10d_adapter::BackendPtr;
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

// The Python factory of stock backends; called and released with the GIL.
std::shared_ptr<py::object> hold(py::object factory) {
  return {new py::object(std::move(factory)), [](py::object* object) {
            if (!Py_IsInitialized()) return;  // at exit: leak rather than touch a dead interpreter
            const py::gil_scoped_acquire gil;
            delete object;
          }};
}

std::function<BackendPtr(const std::string&)> maker(std::shared_ptr<py::object> factory) {
  return [factory](const std::string& device_type) {
    const py::gil_scoped_acquire gil;
    return (*factory)(device_type).cast<BackendPtr>();
  };
}

std::function<std::string(const at::Tensor&)> inspector(py::object function) {
  if (function.is_none()) return nullptr;
  return [held = hold(std::move(function))](const at::Tensor& tensor) {
    const py::gil_scoped_acquire gil;
    return (*held)(tensor).cast<std::string>();
  };
}

// What a factory that knows nothing of deaths, or fails to find out, says is nothing.
std::function<std::string()> who_died(std::shared_ptr<py::object> factory) {
  return [factory]() -> std::string {
    if (!Py_IsInitialized()) return "";
    const py::gil_scoped_acquire gil;
    if (!py::hasattr(*factory, "who_died")) return "";
    try {
      return factory->attr("who_died")().cast<std::string>();
    } catch (const py::error_already_set&) {
      return "";
    }
  };
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The c10d backend of deepytorch.";
  m.attr("abi_version") = DPT_ABI_VERSION;
  // Registers the base classes that the bindings below derive from.
  py::module_::import("torch._C._distributed_c10d");

  py::module_::import("atexit").attr("register")(py::cpp_function(&Backend::finish_all));

  py::class_<Backend::Options, c10d::Backend::Options, c10::intrusive_ptr<Backend::Options>>(
      m, "Options", "Options of a deepytorch group; pass as pg_options.")
      .def(py::init(
               [](Milliseconds timeout) { return c10::make_intrusive<Backend::Options>(timeout); }),
           py::arg("timeout") = Milliseconds(kBackendDefaultTimeout));

  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(m, "Backend")
      .def_property_readonly("options", &Backend::getBackendOptions)
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
         bool native,
         const std::string& tune,
         const std::string& profile,
         size_t staging_bytes,
         bool raise_errors,
         bool delegate_competes,
         py::object inspect) {
        auto options = c10::make_intrusive<Backend::Options>(timeout);
        const auto factory = hold(std::move(delegates));
        options->group_name = group_name;
        options->global_ranks_in_group = global_ranks;
        return c10::make_intrusive<Backend>(Backend::Setup{store,
                                                           rank,
                                                           size,
                                                           std::move(options),
                                                           maker(factory),
                                                           who_died(factory),
                                                           native,
                                                           core_api(),
                                                           parse_tune(tune),
                                                           profile,
                                                           staging_bytes,
                                                           raise_errors,
                                                           inspector(std::move(inspect)),
                                                           delegate_competes});
      },
      py::arg("store"),
      py::arg("rank"),
      py::arg("size"),
      py::kw_only(),
      py::arg("timeout"),
      py::arg("group_name"),
      py::arg("global_ranks"),
      py::arg("delegates"),
      py::arg("native") = true,
      py::arg("tune") = "off",
      py::arg("profile") = "",
      py::arg("staging_bytes") = 0,
      py::arg("raise_errors") = false,
      py::arg("delegate_competes") = false,
      py::arg("inspect") = py::none(),
      "A process group's backend; `delegates(device_type)` makes the stock one when needed.");
}
