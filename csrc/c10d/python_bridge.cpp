#include "python_bridge.hpp"

#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace dpt::c10d_adapter {
namespace {

struct SignalModule {
  // The module "signal" wraps these functions: its own are Python's, and ten times as slow.
  pybind11::module_ signals = pybind11::module_::import("_signal");
  pybind11::object get = signals.attr("getsignal");
  pybind11::object interrupt = signals.attr("default_int_handler");
  std::vector<pybind11::int_> numbers{SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM};
};

enum class Author { kNobody, kLibrary, kUser };

// Knows who wrote files, by what the interpreter calls them.
class Authors {
 public:
  void set_folders(std::vector<std::string> folders) {
    const std::lock_guard lock(mutex_);
    folders_ = std::move(folders);
    known_.clear();
  }

  Author of(const std::string& file) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(file);
    if (found != known_.end()) return found->second;
    if (known_.size() >= kMostKnown) known_.clear();
    return known_.emplace(file, look(file)).first->second;
  }

 private:
  static constexpr size_t kMostKnown = 4096;

  Author look(const std::string& file) const {
    if (file.empty() || file[0] == '<') return Author::kNobody;
    char* const real = realpath(file.c_str(), nullptr);
    const std::string path = real != nullptr ? real : file;
    std::free(real);
    const auto has = [&](const char* part) { return path.find(part) != path.npos; };
    if (has("/site-packages/") || has("/dist-packages/")) {
      const bool is_ours = has("-packages/torch/") || has("-packages/deepytorch");
      return is_ours ? Author::kNobody : Author::kLibrary;
    }
    const bool is_below = std::any_of(folders_.begin(), folders_.end(), [&](const auto& folder) {
      return path.compare(0, folder.size(), folder) == 0;
    });
    return is_below ? Author::kNobody : Author::kUser;
  }

  std::mutex mutex_;  // held for no Python
  std::vector<std::string> folders_;
  std::unordered_map<std::string, Author> known_;
};

Authors& authors() {
  static auto* const all = new Authors;
  return *all;
}

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

pybind11::object owned(void* object) {
  return pybind11::reinterpret_steal<pybind11::object>(static_cast<PyObject*>(object));
}

std::string text_of_python(PyObject* text) {
  Py_ssize_t size = 0;
  const char* const utf8 = PyUnicode_AsUTF8AndSize(text, &size);
  if (utf8 != nullptr) return {utf8, static_cast<size_t>(size)};
  PyErr_Clear();  // a name that is no text in any encoding
  return "";
}

}  // namespace

void set_library_folders(std::vector<std::string> folders) {
  authors().set_folders(std::move(folders));
}

std::optional<CodeLine> find_calling_line() {
  if (!Py_IsInitialized() || is_finalizing()) return std::nullopt;
  if (PyGILState_GetThisThreadState() == nullptr) return std::nullopt;
  const pybind11::gil_scoped_acquire gil;
  const pybind11::error_scope kept;
  std::optional<CodeLine> of_library;
  pybind11::object frame = owned(PyThreadState_GetFrame(PyThreadState_Get()));
  while (frame) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const pybind11::object code = owned(PyFrame_GetCode(raw));
    auto* const fields = reinterpret_cast<PyCodeObject*>(code.ptr());
    std::string file = text_of_python(fields->co_filename);
    const Author author = authors().of(file);
    if (author == Author::kUser || (author == Author::kLibrary && !of_library)) {
      CodeLine found{std::move(file), text_of_python(fields->co_name), PyFrame_GetLineNumber(raw)};
      if (author == Author::kUser) return found;
      of_library = std::move(found);
    }
    frame = owned(PyFrame_GetBack(raw));
  }
  return of_library;
}

std::exception_ptr run_signal_handlers() {
  if (!Py_IsInitialized()) return nullptr;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return nullptr;
  return std::make_exception_ptr(pybind11::error_already_set());
}

bool handles_signals() {
  if (!Py_IsInitialized()) return false;
  const pybind11::gil_scoped_acquire gil;
  PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<SignalModule> storage;
  const SignalModule& module =
      storage.call_once_and_store_result([] { return SignalModule(); }).get_stored();
  return std::any_of(module.numbers.begin(), module.numbers.end(), [&](const auto& number) {
    const pybind11::object handler = module.get(number);
    return PyCallable_Check(handler.ptr()) != 0 && !handler.is(module.interrupt);
  });
}

void without_gil(c10::function_ref<void()> function) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    const pybind11::gil_scoped_release no_gil;
    function();
  } else {
    function();
  }
}

}  // namespace dpt::c10d_adapter
