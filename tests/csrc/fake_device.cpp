#include "fake_device.hpp"

#include <barrier>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "base/error.hpp"
#include "cuda/device_group.hpp"
#include "cuda/device_trials.hpp"
#include "cuda/staged_group.hpp"
#include "cuda/trees/trees.hpp"
#include "fake_copy_engine.hpp"

namespace dpt {
namespace testing {
namespace {

thread_local double device_clock_us = 0;
std::mutex failure_mutex;
std::optional<DeviceGroup::Failure> left_behind;
int num_released = 0;

// The ranks of a group share this: where each has its input.
struct FakeMeeting {
  explicit FakeMeeting(int size) : inputs(size), all(size) {}
  std::vector<const void*> inputs;
  std::barrier<> all;
};

class FakeGroup final : public DeviceGroup {
 public:
  FakeGroup(const Setup& setup, std::shared_ptr<FakeMeeting> meeting)
      : rank_(setup.rank),
        wiring_(setup.wiring),
        meeting_(std::move(meeting)),
        layout_(cuda::Layout::of(static_cast<int>(meeting_->inputs.size()), 32 << 10)) {}

  const cuda::Layout& layout() const override { return layout_; }
  cuda::Wiring wiring() const override { return wiring_; }

  // Sums of floats; other operations only take their time.
  void launch(const dpt_request& request,
              const DevicePlan& plan,
              cuda::Stream,
              const staged::StartHooks&) override {
    DPT_CHECK(wiring_ != cuda::Wiring::kPartial || plan.algorithm == AlgorithmName::kTree);
    meeting_->inputs[rank_] = request.inputs[0];
    meeting_->all.arrive_and_wait();
    std::vector<float> sum;
    if (request.collective == DPT_ALL_REDUCE && request.dtype == DPT_FLOAT32) {
      sum.assign(request.count, 0);
      for (const void* input : meeting_->inputs) {
        for (size_t i = 0; i < request.count; ++i) sum[i] += static_cast<const float*>(input)[i];
      }
    }
    meeting_->all.arrive_and_wait();
    std::copy(sum.begin(), sum.end(), static_cast<float*>(request.outputs[0]));
    advance_device(fake_devices().time_us(plan, request.count * size_of(request.dtype)));
  }

  std::optional<Failure> failure() const override {
    const std::lock_guard lock(failure_mutex);
    return left_behind;
  }
  void abort() override {}
  void stop_waiting() override {
    const std::lock_guard lock(failure_mutex);
    if (fake_devices().waiting && !left_behind) left_behind = {Failure::kAborted, 1, 9};
  }
  void release() override {
    const std::lock_guard lock(failure_mutex);
    ++num_released;
  }

 private:
  int rank_;
  cuda::Wiring wiring_;
  std::shared_ptr<FakeMeeting> meeting_;
  cuda::Layout layout_;
};

class FakeTrials final : public DeviceTrials {
 public:
  explicit FakeTrials(cuda::Stream stream)
      : lane_(fake_devices().peer_access ? nullptr : static_cast<FakeLane*>(stream)) {}
  ~FakeTrials() override {
    if (lane_ != nullptr) lane_->synchronize();
  }

  bool can_queue() override { return fake_devices().queues; }
  bool is_idle() override { return fake_devices().idle; }
  size_t free_bytes() const override { return fake_devices().free_bytes; }
  char* allocate(size_t bytes) override {
    memory_.resize(bytes);
    return memory_.data();
  }
  void close_gate() override {}
  void open_gate() override {}
  void start_clock() override { start_us_ = device_clock_us; }
  void stop_clock() override { stop_us_ = device_clock_us; }
  std::optional<double> elapsed_us() override {
    if (lane_ != nullptr && !lane_->is_idle()) return std::nullopt;
    return stop_us_ - start_us_;
  }

 private:
  FakeLane* const lane_;
  std::vector<char> memory_;
  double start_us_ = 0;
  double stop_us_ = 0;
};

}  // namespace

void fail_devices(std::optional<DeviceGroup::Failure> failure) {
  const std::lock_guard lock(failure_mutex);
  left_behind = failure;
  num_released = 0;
}
int devices_released() {
  const std::lock_guard lock(failure_mutex);
  return num_released;
}

FakeDevices& fake_devices() {
  static FakeDevices devices;
  return devices;
}

void advance_device(double time_us) { device_clock_us += time_us; }

}  // namespace testing

std::string DeviceGroup::why_absent() { return testing::fake_devices().why_absent; }

void DeviceGroup::outside_capture(int, const std::function<void()>& task) { task(); }

uint64_t DeviceGroup::capture_of(cuda::Stream) { return 0; }
bool DeviceGroup::has_ended(void*) { return true; }

void DeviceGroup::after_fork() {}

int DeviceGroup::peer_mappings() { return 0; }
uint64_t DeviceGroup::landing_calls() { return 0; }

std::unique_ptr<DeviceGroup> DeviceGroup::connect(const Setup& setup) {
  if (!setup.peer_access) {
    return connect_staged(setup, [&setup] {
      testing::FakeCopyEngine::Options options;
      options.aliased = true;
      options.on_fork = [] { testing::advance_device(testing::fake_devices().staged_us); };
      options.can_map = setup.rank != testing::fake_devices().unmappable_rank;
      return std::make_unique<testing::FakeCopyEngine>(setup.rank, options);
    });
  }
  using testing::FakeMeeting;
  std::shared_ptr<FakeMeeting> own;
  if (setup.rank == 0) own = std::make_shared<FakeMeeting>(setup.global_ranks.size());
  const auto address = reinterpret_cast<uintptr_t>(&own);
  const std::string text = setup.all_gather(std::to_string(address))[0];
  const auto meeting =
      *reinterpret_cast<std::shared_ptr<FakeMeeting>*>(std::strtoull(text.c_str(), nullptr, 10));
  setup.all_gather("");  // rank 0's may go now
  return std::make_unique<testing::FakeGroup>(setup, meeting);
}

std::unique_ptr<DeviceTrials> DeviceTrials::on(int, cuda::Stream stream) {
  return std::make_unique<testing::FakeTrials>(stream);
}

namespace cuda {
namespace {

int link_to(int device, const std::string& uuid) {
  const std::string& links = testing::fake_devices().links;
  return links.empty() ? 1 : parse_links(links)->between[device][std::stoi(uuid.substr(4))];
}

}  // namespace

DeviceModel model_of(int device) {
  const int which = testing::fake_devices().shared ? 0 : device;
  return {"a fake GPU", 132, "GPU-" + std::to_string(which)};
}
std::optional<bool> has_nvlink(int device, const std::string& uuid) {
  return link_to(device, uuid) > LinkMatrix::kPcie;
}
std::optional<bool> has_peer_access(int device, const std::string& uuid) {
  return testing::fake_devices().peer_access && link_to(device, uuid) != LinkMatrix::kNone;
}
bool can_reduce_on_device(DataType, ReduceOp) { return true; }
bool has_large_kernels(DataType dtype, ReduceOp) { return size_of(dtype) <= sizeof(float); }

}  // namespace cuda
}  // namespace dpt
