#include "cuda/device_trials.hpp"

#include <atomic>
#include <chrono>
#include <cstdio>

#include "cuda/checks.hpp"
#include "cuda/device_scope.hpp"
#include "cuda/gate.hpp"

namespace dpt {
namespace {

constexpr std::chrono::seconds kGateTimeout{2};
constexpr std::chrono::milliseconds kProbeTimeout{50};

// Words that gates look at; host memory, never freed, because that would wait for the device.
class GateWords {
 public:
  static GateWords& instance() {
    static auto* const words = new GateWords;
    return *words;
  }

  // One of the words. Two measurements of a process share one only if many run at once, and then
  // their tickets still differ.
  uint32_t* take() { return words_ + next_word_++ % kWords; }
  uint32_t next_ticket() { return ++ticket_; }

 private:
  static constexpr uint32_t kWords = 64;

  GateWords() {
    DPT_CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&words_),
                                 kWords * sizeof *words_,
                                 cudaHostAllocMapped | cudaHostAllocPortable));
    for (uint32_t i = 0; i < kWords; ++i) words_[i] = 0;
  }

  uint32_t* words_ = nullptr;
  std::atomic<uint32_t> next_word_{0};
  std::atomic<uint32_t> ticket_{0};
};

class Event {
 public:
  explicit Event(unsigned flags) { DPT_CUDA_CHECK(cudaEventCreateWithFlags(&event_, flags)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) const { DPT_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  bool has_ended() const {
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) return cudaGetLastError(), false;
    cuda::check(state, "cudaEventQuery");
    return true;
  }
  double us_since(const Event& start) const {
    float ms = 0;
    DPT_CUDA_CHECK(cudaEventElapsedTime(&ms, start.event_, event_));
    return ms * 1e3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaTrials final : public DeviceTrials {
 public:
  CudaTrials(int device, cuda::Stream stream)
      : device_(device), scope_(device), stream_(static_cast<cudaStream_t>(stream)) {
    word_ = GateWords::instance().take();
    void* on_device = nullptr;
    DPT_CUDA_CHECK(cudaHostGetDevicePointer(&on_device, word_, 0));
    word_on_device_ = static_cast<const uint32_t*>(on_device);
  }

  ~CudaTrials() override {
    open_gate();
    if (memory_ != nullptr) cudaFreeAsync(memory_, stream_);
    if (pool_ != nullptr) cudaMemPoolDestroy(pool_);  // once that has been carried out
    cudaGetLastError();
  }

  bool can_queue() override {
    const auto start = std::chrono::steady_clock::now();
    start_gate(kProbeTimeout);
    const bool returned = std::chrono::steady_clock::now() - start < kProbeTimeout / 2;
    open_gate();
    return returned;
  }

  bool is_idle() override {
    if (!asked_) idle_.record(stream_);
    asked_ = true;
    return idle_.has_ended();
  }

  size_t free_bytes() const override {
    size_t free = 0;
    size_t total = 0;
    DPT_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
  }

  char* allocate(size_t bytes) override {
    // From a pool of its own, so that none of it stays behind in the program's.
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device_;
    if (cudaMemPoolCreate(&pool_, &properties) != cudaSuccess) pool_ = nullptr;
    void* memory = nullptr;
    if (pool_ == nullptr ||
        cudaMallocFromPoolAsync(&memory, bytes, pool_, stream_) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    memory_ = memory;
    DPT_CUDA_CHECK(cudaMemsetAsync(memory_, 0, bytes, stream_));
    return static_cast<char*>(memory_);
  }

  void close_gate() override { start_gate(kGateTimeout); }
  void open_gate() override { __atomic_store_n(word_, ticket_, __ATOMIC_RELEASE); }
  void start_clock() override { start_.record(stream_); }
  void stop_clock() override { stop_.record(stream_); }
  std::optional<double> elapsed_us() override {
    if (!stop_.has_ended()) return std::nullopt;
    return stop_.us_since(start_);
  }

 private:
  void start_gate(std::chrono::nanoseconds timeout) {
    ticket_ = GateWords::instance().next_ticket();
    cuda::start_gate(stream_, word_on_device_, ticket_, static_cast<uint64_t>(timeout.count()));
  }

  int device_;
  cuda::DeviceScope scope_;
  cuda::RelaxedCapture relaxed_;
  cudaStream_t stream_;
  Event idle_{cudaEventDisableTiming};
  Event start_{cudaEventDefault};
  Event stop_{cudaEventDefault};
  bool asked_ = false;
  uint32_t* word_ = nullptr;
  const uint32_t* word_on_device_ = nullptr;
  uint32_t ticket_ = 0;
  cudaMemPool_t pool_ = nullptr;
  void* memory_ = nullptr;
};

}  // namespace

cuda::DeviceModel cuda::model_of(int device) {
  cudaDeviceProp properties{};
  DPT_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  std::string uuid = "GPU-";
  for (size_t i = 0; i < std::size(properties.uuid.bytes); ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", properties.uuid.bytes[i] & 255);
    if (i == 4 || i == 6 || i == 8 || i == 10) uuid += '-';
    uuid += digits;
  }
  return {properties.name, properties.multiProcessorCount, uuid};
}

// Nothing where this process does not see that one.
static std::optional<int> find_device(const std::string& uuid) {
  int devices = 0;
  DPT_CUDA_CHECK(cudaGetDeviceCount(&devices));
  for (int peer = 0; peer < devices; ++peer) {
    if (cuda::model_of(peer).uuid == uuid) return peer;
  }
  return std::nullopt;
}

// Peers do atomic operations on each other's memory over NVLink, and over no other link.
std::optional<bool> cuda::has_nvlink(int device, const std::string& uuid) {
  const std::optional<int> peer = find_device(uuid);
  if (!peer || *peer == device) return peer ? std::optional(true) : std::nullopt;
  int atomics = 0;
  DPT_CUDA_CHECK(
      cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, *peer));
  return atomics != 0;
}

std::optional<bool> cuda::has_peer_access(int device, const std::string& uuid) {
  const std::optional<int> peer = find_device(uuid);
  if (!peer || *peer == device) return peer ? std::optional(true) : std::nullopt;
  int access = 0;
  DPT_CUDA_CHECK(cudaDeviceCanAccessPeer(&access, device, *peer));
  return access != 0;
}

std::unique_ptr<DeviceTrials> DeviceTrials::on(int device, cuda::Stream stream) {
  return std::make_unique<CudaTrials>(device, stream);
}

}  // namespace dpt
