// Makes torch without CUDA believe in a GPU. Tensors say that they lie there, a device guard knows
// one stream, and a stock backend only counts. What a call costs on its way to that backend can be
// measured with caches and TLBs as NCCL and CUDA leave them.
#include <c10/core/impl/FakeGuardImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>
#include <torch/extension.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>);

const at::Device kGpu(at::kCUDA, 0);

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Clock = std::chrono::steady_clock;

class Stock : public c10d::Backend {
 public:
  Stock(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override { return "stock"; }
  WorkPtr allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    return start();
  }
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override {
    return start();
  }
  WorkPtr _reduce_scatter_base(at::Tensor&,
                               at::Tensor&,
                               const c10d::ReduceScatterOptions&) override {
    return start();
  }
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>&,
                              const c10d::AllreduceCoalescedOptions&) override {
    return start();
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>&,
                                          std::vector<at::Tensor>&,
                                          const c10d::AllgatherOptions&) override {
    return start();
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>&,
                                          std::vector<at::Tensor>&,
                                          const c10d::ReduceScatterOptions&) override {
    return start();
  }

  std::string failure;  // empty: none
  int calls = 0;
  int calls_with_gil = 0;

 private:
  // Does what NCCL's does as well: a lock, the clock, the stream, an object for the work.
  WorkPtr start() {
    const std::lock_guard lock(mutex_);
    ++calls;
    calls_with_gil += PyGILState_Check();
    if (!failure.empty()) C10_THROW_ERROR(DistBackendError, failure);
    at_ = Clock::now();
    stream_ = c10::impl::VirtualGuardImpl(at::kCUDA).getStream(kGpu).id();
    return c10::make_intrusive<c10d::Work>();
  }

  std::mutex mutex_;
  Clock::time_point at_;
  int64_t stream_ = 0;
};

at::Tensor tensor_on_gpu(int64_t elements, bool integers = false) {
  auto* const memory = new float[elements]();  // as large as integers
  return at::for_blob(memory, {elements})
      .deleter([](void* mine) { delete[] static_cast<float*>(mine); })
      .options(at::device(kGpu).dtype(integers ? at::kInt : at::kFloat))
      .target_device(kGpu)
      .make_tensor();
}

// Memory that is run through, page by page, to push everything else out.
class Flood {
 public:
  explicit Flood(size_t pages) : pages_(pages), code_(map(PROT_EXEC)), data_(map(0)) {
    constexpr char kReturn = '\xC3';
    std::memset(code_, kReturn, pages_ * kPage);
    std::memset(data_, 1, pages_ * kPage);
  }
  ~Flood() {
    munmap(code_, pages_ * kPage);
    munmap(data_, pages_ * kPage);
  }

  void run() const {
    for (size_t page = 0; page < pages_; ++page) {
      reinterpret_cast<void (*)()>(code_ + page * kPage + page * kLine % kPage)();
    }
    for (size_t page = 0; page < pages_; ++page) {
      volatile char* const at = data_ + page * kPage;
      for (size_t line = 0; line < 8; ++line) at[(page + 8 * line) * kLine % kPage] = 2;
    }
  }

 private:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kLine = 64;

  char* map(int protection) const {
    void* const mapped = mmap(nullptr,
                              pages_ * kPage,
                              PROT_READ | PROT_WRITE | protection,
                              MAP_PRIVATE | MAP_ANONYMOUS,
                              -1,
                              0);
    TORCH_CHECK(mapped != MAP_FAILED, "no memory for ", pages_, " pages");
    madvise(mapped, pages_ * kPage, MADV_NOHUGEPAGE);
    return static_cast<char*>(mapped);
  }

  size_t pages_;
  char* code_;
  char* data_;
};

double median(std::vector<double>& values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Nanoseconds of a call of each backend, the median of `calls` that take turns.
std::map<std::string, std::pair<double, double>> cost(c10d::Backend& stock,
                                                      c10d::Backend& ours,
                                                      int calls,
                                                      size_t pages) {
  const py::gil_scoped_release no_gil;
  const Flood flood(pages);
  std::vector<at::Tensor> one = {tensor_on_gpu(1 << 18)};
  at::Tensor all = tensor_on_gpu((1 << 18) * ours.getSize());
  const std::map<std::string, std::function<void(c10d::Backend&)>> operations = {
      {"all_reduce", [&](c10d::Backend& on) { on.allreduce(one, {}); }},
      {"all_gather", [&](c10d::Backend& on) { on._allgather_base(all, one[0], {}); }},
      {"reduce_scatter", [&](c10d::Backend& on) { on._reduce_scatter_base(one[0], all, {}); }}};
  std::map<std::string, std::pair<double, double>> costs;
  for (const auto& [name, start] : operations) {
    std::vector<double> times[2];
    for (int call = 0; call < calls; ++call) {
      for (const bool is_ours : {false, true}) {
        flood.run();
        const auto began = Clock::now();
        start(is_ours ? ours : stock);
        const std::chrono::duration<double, std::nano> took = Clock::now() - began;
        times[is_ours].push_back(took.count());
      }
    }
    costs[name] = {median(times[0]), median(times[1])};
  }
  return costs;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch._C._distributed_c10d");
  py::class_<Stock, c10d::Backend, c10::intrusive_ptr<Stock>>(m, "Stock")
      .def(py::init<int, int>())
      .def_readwrite("failure", &Stock::failure)
      .def_readonly("calls", &Stock::calls)
      .def_readonly("calls_with_gil", &Stock::calls_with_gil);
  m.def("all_reduce_with_gil", [](c10d::Backend& on, at::Tensor tensor) {
    std::vector<at::Tensor> tensors = {std::move(tensor)};
    on.allreduce(tensors, {});
  });
  m.def("all_gather_coalesced",
        [](c10d::Backend& on, std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs) {
          on.allgather_into_tensor_coalesced(outputs, inputs, {});
        });
  m.def("reduce_scatter_coalesced",
        [](c10d::Backend& on, std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs) {
          on.reduce_scatter_tensor_coalesced(outputs, inputs, {});
        });
  m.def("tensor_on_gpu", &tensor_on_gpu, py::arg("elements"), py::arg("integers") = false);
  m.def("cost", &cost, py::arg("stock"), py::arg("ours"), py::arg("calls"), py::arg("pages"));
}
