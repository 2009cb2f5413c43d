#include "cuda/copy_engine.hpp"

#include <vector>

#include "cuda/device_scope.hpp"
#include "cuda/driver.hpp"
#include "cuda/lane_streams.hpp"
#include "cuda/sum_pieces.hpp"

namespace dpt::cuda {
namespace {

using staged::Lane;
using staged::Rows;
using staged::Word;

struct Functions {
  decltype(&::cuStreamBatchMemOp) batch = DPT_DRIVER(cuStreamBatchMemOp);
  decltype(&::cuMemGetAddressRange) range = DPT_DRIVER(cuMemGetAddressRange);

  static const Functions& get() {
    static const Functions instance;
    return instance;
  }
};

class OrderedStream {
 public:
  explicit OrderedStream(cudaStream_t stream) : stream_(stream) {}

  // Words in a row are one call: each takes the driver as long as a copy.
  void add(const CUstreamBatchMemOpParams& operation) { words_.push_back(operation); }
  void flush() {
    if (words_.empty()) return;
    const auto count = static_cast<unsigned>(words_.size());
    const CUresult result = Functions::get().batch(stream_, count, words_.data(), 0);
    words_.clear();
    check(result, "cuStreamBatchMemOp");
  }
  // The stream behind the words so far.
  cudaStream_t get() {
    flush();
    return stream_;
  }
  cudaError_t query() const { return cudaStreamQuery(stream_); }

 private:
  cudaStream_t stream_;
  std::vector<CUstreamBatchMemOpParams> words_;
};

class OrderEvent {
 public:
  OrderEvent() { DPT_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~OrderEvent() { cudaEventDestroy(event_); }
  OrderEvent(const OrderEvent&) = delete;
  OrderEvent& operator=(const OrderEvent&) = delete;

  void record(cudaStream_t stream) const { DPT_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  void hold(cudaStream_t stream) const { DPT_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaCopyEngine final : public staged::CopyEngine {
 public:
  // `device` is the current one.
  CudaCopyEngine(int device, Slots slots)
      : device_(device),
        up_(slots == Slots::kOnHost ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice),
        down_(slots == Slots::kOnHost ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToDevice),
        lent_(device) {
    for (int lane = 0; lane < LaneStreams::kCount; ++lane) streams_.emplace_back(lent_[lane]);
  }

  ~CudaCopyEngine() override {
    const RelaxedCapture relaxed;
    cudaFree(buffers_);
    if (memory_ != nullptr) cudaHostUnregister(memory_);
    cudaGetLastError();
  }

  void map(char* memory, size_t bytes, size_t buffer_bytes) override {
    const RelaxedCapture relaxed;
    const std::shared_ptr<void> entered = enter();
    DPT_CUDA_CHECK(
        cudaHostRegister(memory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
    memory_ = memory;
    void* on_device = nullptr;
    DPT_CUDA_CHECK(cudaHostGetDevicePointer(&on_device, memory, 0));
    on_device_ = reinterpret_cast<CUdeviceptr>(on_device);
    buffer_bytes_ = buffer_bytes;
    void* buffers = nullptr;
    if (buffer_bytes == 0) return;
    DPT_CUDA_CHECK(cudaMalloc(&buffers, Lane::kCount * buffer_bytes));
    buffers_ = static_cast<char*>(buffers);
  }

  std::shared_ptr<void> enter() override { return std::make_shared<DeviceScope>(device_); }

  void fork(staged::Stream stream) override {
    forked_.record(static_cast<cudaStream_t>(stream));
    for (OrderedStream& each : streams_) forked_.hold(each.get());
  }
  void meet() override {
    cudaStream_t const last = first_down().get();
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (&streams_[i] == &first_down()) continue;
      met_[i].record(streams_[i].get());
      met_[i].hold(last);
    }
  }
  void join(staged::Stream stream) override {
    joined_.record(first_down().get());
    joined_.hold(static_cast<cudaStream_t>(stream));
  }

  // cudaMemcpy2DAsync refuses rows of which one lies in another allocation. Of memory that is
  // mapped piece by piece (expandable segments) one piece counts: the pointer's attributes would
  // say all of the addresses reserved for it.
  bool is_one(const char* memory, size_t bytes) override {
    CUdeviceptr begin = 0;
    size_t size = 0;
    const auto first = reinterpret_cast<CUdeviceptr>(memory);
    const CUresult result = Functions::get().range(&begin, &size, first);
    return result == CUDA_SUCCESS && first >= begin && first + bytes <= begin + size;
  }
  void copy_up(int index, char* host, const char* device, const Rows& rows) override {
    if (rows.count == 1) {
      DPT_CUDA_CHECK(
          cudaMemcpyAsync(host, device, rows.bytes, up_, stream({Lane::kUp, index}).get()));
      return;
    }
    DPT_CUDA_CHECK(cudaMemcpy2DAsync(host,
                                     rows.host_pitch,
                                     device,
                                     rows.device_pitch,
                                     rows.bytes,
                                     rows.count,
                                     up_,
                                     stream({Lane::kUp, index}).get()));
  }
  void copy_down(int index, char* device, const char* host, const Rows& rows) override {
    if (rows.count == 1) {
      DPT_CUDA_CHECK(
          cudaMemcpyAsync(device, host, rows.bytes, down_, stream({Lane::kDown, index}).get()));
      return;
    }
    DPT_CUDA_CHECK(cudaMemcpy2DAsync(device,
                                     rows.device_pitch,
                                     host,
                                     rows.host_pitch,
                                     rows.bytes,
                                     rows.count,
                                     down_,
                                     stream({Lane::kDown, index}).get()));
  }
  char* buffer(int index) override { return buffers_ + index * buffer_bytes_; }
  void reduce(int index, const staged::Pieces& pieces) override {
    sum_pieces(pieces, stream({Lane::kDown, index}).get());
  }
  void copy_local(char* to, const char* from, size_t bytes) override {
    if (bytes == 0) return;
    DPT_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, first_down().get()));
  }

  // The driver compares as has_come_to does.
  void wait(Lane lane, const Word& word, uint32_t value) override {
    add_wait(lane, word, value, CU_STREAM_WAIT_VALUE_GEQ);
  }
  void wait_for_bits(Lane lane, const Word& word, uint32_t bits) override {
    add_wait(lane, word, bits, CU_STREAM_WAIT_VALUE_AND);
  }
  void write(Lane lane, Word& word, uint32_t value) override {
    CUstreamBatchMemOpParams operation{};
    operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    operation.writeValue.address = address_of(word);
    operation.writeValue.value = value;
    operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // behind a memory barrier
    stream(lane).add(operation);
  }

  void submit(Lane lane) override { stream(lane).flush(); }

  bool is_idle() override {
    const std::shared_ptr<void> entered = enter();
    for (const OrderedStream& each : streams_) {
      const cudaError_t state = each.query();
      if (state != cudaSuccess) cudaGetLastError();
      if (state == cudaErrorNotReady) return false;
    }
    return true;
  }

 private:
  OrderedStream& stream(Lane lane) { return streams_[lane.direction * Lane::kCount + lane.index]; }
  OrderedStream& first_down() { return stream({Lane::kDown, 0}); }
  CUdeviceptr address_of(const Word& word) const {
    return on_device_ + (reinterpret_cast<const char*>(&word) - memory_);
  }

  void add_wait(Lane lane, const Word& word, uint32_t value, unsigned flags) {
    CUstreamBatchMemOpParams operation{};
    operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    operation.waitValue.address = address_of(word);
    operation.waitValue.value = value;
    operation.waitValue.flags = flags;
    stream(lane).add(operation);
  }

  const int device_;
  const cudaMemcpyKind up_;
  const cudaMemcpyKind down_;
  char* memory_ = nullptr;
  CUdeviceptr on_device_ = 0;
  char* buffers_ = nullptr;  // of the lanes down
  size_t buffer_bytes_ = 0;
  const LaneStreams lent_;
  std::vector<OrderedStream> streams_;
  OrderEvent forked_;
  OrderEvent met_[LaneStreams::kCount];
  OrderEvent joined_;
};

}  // namespace

std::unique_ptr<staged::CopyEngine> make_copy_engine(int device, Slots slots) {
  const RelaxedCapture relaxed;
  const DeviceScope scope(device);
  DPT_CUDA_CHECK(cudaFree(nullptr));  // the device's context, if nothing has made it yet
  Functions::get();                   // found, or an error now
  load_sum_pieces();
  return std::make_unique<CudaCopyEngine>(device, slots);
}

}  // namespace dpt::cuda
