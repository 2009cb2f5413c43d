#include "cuda/device_group.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <mutex>
#include <sstream>
#include <thread>

#include "base/log.hpp"
#include "cuda/checks.hpp"
#include "cuda/copy_engine.hpp"
#include "cuda/device_memory.hpp"
#include "cuda/device_pool.hpp"
#include "cuda/device_scope.hpp"
#include "cuda/staged_group.hpp"
#include "cuda/trees/tree_all_reduce.hpp"
#include "staged/group.hpp"
#include "transport/shm/fd_exchange.hpp"

namespace dpt {
namespace {

using cuda::DeviceMemory;
using cuda::ExchangeArguments;
using cuda::HostStatus;
using cuda::kMaxRanks;
using cuda::Launch;
using cuda::Layout;
using cuda::ReduceArguments;
using cuda::RingArguments;

constexpr uint32_t kLargestSlot = 64 << 10;
constexpr uint32_t kSmallestSlot = 4 << 10;
// How long a group that goes away waits for its kernels.
constexpr std::chrono::milliseconds kDestroyGrace{5000};

// The layout with the largest slots that fit; slot_bytes 0: none does.
Layout layout_for(const DeviceGroup::Setup& setup) {
  const int size = static_cast<int>(setup.global_ranks.size());
  for (uint32_t slot = kLargestSlot; slot >= kSmallestSlot; slot /= 2) {
    const Layout layout = Layout::of(size, slot, setup.channels, setup.nvlink);
    if (layout.block_bytes() <= setup.staging_bytes) return layout;
  }
  return Layout::of(size, 0);
}

// Slots from which peers' copy engines fetch come behind a block, if there is room for them.
constexpr size_t kCopySlot = 4 << 20;
constexpr size_t kCopySlots = staged::Group::kDepth * kCopySlot;

// Memory of the host that kernels write their last word to.
class MappedStatus {
 public:
  MappedStatus() {
    DPT_CUDA_CHECK(
        cudaHostAlloc(reinterpret_cast<void**>(&status_), sizeof *status_, cudaHostAllocMapped));
    *status_ = {};
    DPT_CUDA_CHECK(cudaHostGetDevicePointer(reinterpret_cast<void**>(&on_device_), status_, 0));
  }
  ~MappedStatus() { cudaFreeHost(status_); }
  MappedStatus(const MappedStatus&) = delete;
  MappedStatus& operator=(const MappedStatus&) = delete;

  const volatile HostStatus& read() const { return *status_; }
  void abort() { __atomic_store_n(&status_->abort, 1u, __ATOMIC_RELEASE); }
  void release() { __atomic_store_n(&status_->released, 1u, __ATOMIC_RELEASE); }
  HostStatus* on_device() const { return on_device_; }

 private:
  HostStatus* status_ = nullptr;
  HostStatus* on_device_ = nullptr;
};

// Ranks that are in the same operation get the same; whatever may differ between them stays out.
uint32_t describe(const dpt_request& request, const DevicePlan& plan) {
  uint32_t hash = 2166136261u;  // FNV-1a
  const auto mix = [&](uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      hash = (hash ^ static_cast<uint32_t>(value >> 8 * byte & 255)) * 16777619u;
    }
  };
  const bool uneven = request.input_counts != nullptr || request.output_counts != nullptr;
  mix(request.collective);
  mix(request.dtype);
  mix(request.reduce_op);
  mix(static_cast<uint64_t>(request.root));
  mix(uneven ? ~uint64_t{0} : request.count);
  mix(static_cast<uint64_t>(plan.algorithm));
  mix(plan.chunk_bytes);
  mix(static_cast<uint64_t>(plan.grid.channels) << 32 | static_cast<uint32_t>(plan.grid.threads));
  return hash;
}

std::atomic<uint64_t> landing_calls_made{0};

bool is_neighbour(const DeviceGroup::Setup& setup, int rank) {
  return rank != setup.rank && (setup.neighbours >> rank & 1) != 0;
}

class ConnectedDeviceGroup final : public DeviceGroup {
 public:
  // `copies`: what the copy engines do, if they can.
  ConnectedDeviceGroup(const Setup& setup,
                       const Layout& layout,
                       std::vector<DeviceMemory> blocks,
                       std::unique_ptr<staged::Group> copies,
                       cuda::DevicePool::Peers pools)
      : device_(setup.device),
        blocks_(std::move(blocks)),
        copies_(std::move(copies)),
        pool_(pools.bases.empty() || !setup.lands ? nullptr : &cuda::DevicePool::of(device_)),
        pools_(std::move(pools)),
        wiring_(setup.wiring),
        trees_(setup.trees) {
    group_.layout = layout;
    group_.rank = setup.rank;
    group_.status = status_.on_device();
    for (int rank = 0; rank < layout.size; ++rank) {
      group_.blocks[rank] = blocks_[rank].address();
      if (is_neighbour(setup, rank)) group_.neighbours |= 1u << rank;
    }
    std::copy(pools_.bases.begin(), pools_.bases.end(), group_.pools);
  }

  ~ConnectedDeviceGroup() override {
    // A peer that still uses this rank's block has a mapping of its own, which keeps it.
    const cuda::DeviceScope scope(device_);
    const Deadline grace(kDestroyGrace);
    while (cudaStreamQuery(last_stream_) == cudaErrorNotReady && !grace.expired()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    copies_.reset();
    abort();
    release();
    cudaStreamSynchronize(last_stream_);
    cudaGetLastError();
  }

  const Layout& layout() const override { return group_.layout; }
  cuda::Wiring wiring() const override { return wiring_; }
  cuda::Staging copies() const override { return copies_ ? staging_of(*copies_) : cuda::Staging{}; }
  size_t memory_bytes() const override {
    return group_.layout.block_bytes() + (copies_ ? kCopySlots : 0);
  }

  void launch(const dpt_request& request,
              const DevicePlan& plan,
              cuda::Stream stream,
              const staged::StartHooks& hooks) override {
    // The others touch every rank's block.
    DPT_CHECK(wiring_ != cuda::Wiring::kPartial || plan.algorithm == AlgorithmName::kTree);
    const cuda::DeviceScope scope(device_);
    last_stream_ = static_cast<cudaStream_t>(stream);
    if (plan.algorithm == AlgorithmName::kCopyEngine) {
      return copies_->start(request, {plan.chunk_bytes, 0}, stream, {.failed = hooks.failed});
    }
    const size_t slot = group_.layout.slot_bytes;
    const size_t chunk = plan.chunk_bytes != 0 ? std::min(plan.chunk_bytes, slot) : slot;
    Launch launch{group_, {}, plan.grid, stream, static_cast<uint32_t>(chunk)};
    const std::chrono::nanoseconds timeout = limited(std::chrono::milliseconds(request.timeout_ms));
    launch.call.timeout_ns = static_cast<uint64_t>(timeout.count());
    launch.call.description = describe(request, plan);
    switch (request.collective) {
      case DPT_ALL_REDUCE:
      case DPT_REDUCE_SCATTER:
        return reduce(launch, request, plan);
      default:
        return exchange(launch, request, plan);
    }
  }

  std::optional<Failure> failure() const override {
    const volatile HostStatus& status = status_.read();
    const uint32_t code = status.code;
    if (code == HostStatus::kNone) return copies_ ? failure_of(*copies_) : std::nullopt;
    std::atomic_thread_fence(std::memory_order_acquire);
    const auto kind = code == HostStatus::kMismatch  ? Failure::kMismatch
                      : code == HostStatus::kAborted ? Failure::kAborted
                                                     : Failure::kTimeout;
    return Failure{kind, static_cast<int>(status.peer), status.sequence};
  }

  void abort() override {
    status_.abort();
    if (copies_) copies_->stop_waiting();
  }
  void release() override {
    status_.release();
    if (copies_) copies_->release();
  }

 private:
  // Whether peers may write to it, see NOTE [Landing] in landing.cuh.
  bool takes_landings(const char* output, uint64_t bytes) const {
    return pool_ != nullptr && reinterpret_cast<uintptr_t>(output) % cuda::kLandingUnit == 0 &&
           pool_->is_shared(output, bytes);
  }
  static void count_landings(const Launch& launch) {
    if (launch.call.landings != 0) ++landing_calls_made;
  }
  static const char* input(const dpt_request& request, int index) {
    return static_cast<const char*>(request.inputs[index]);
  }
  static char* output(const dpt_request& request, int index) {
    return static_cast<char*>(request.outputs[index]);
  }

  void reduce(Launch& launch, const dpt_request& request, const DevicePlan& plan) const {
    const int size = group_.layout.size;
    const uint64_t bytes = request.count * size_of(request.dtype);
    const double factor = request.reduce_op == DPT_PREMUL_SUM ? request.premul_factor : 1;
    const double average = request.reduce_op == DPT_AVG ? 1.0 / size : 1;
    const bool whole = request.collective == DPT_ALL_REDUCE;
    const AlgorithmName algorithm = plan.algorithm;
    if (whole && algorithm != AlgorithmName::kLowLatency) {
      if (takes_landings(output(request, 0), bytes)) launch.call.landings = ~0u;
      count_landings(launch);
      if (plan.algorithm == AlgorithmName::kTree) {
        return cuda::tree_all_reduce(
            launch,
            {input(request, 0), output(request, 0), bytes, factor, average, trees_},
            request.dtype,
            request.reduce_op);
      }
      auto* const start =
          algorithm == AlgorithmName::kPacket ? cuda::packet_all_reduce : cuda::two_shot_all_reduce;
      return start(launch,
                   {input(request, 0), output(request, 0), bytes, factor, average},
                   request.dtype,
                   request.reduce_op);
    }
    ReduceArguments arguments{{}, output(request, 0), bytes, factor, average};
    for (int rank = 0; rank < size; ++rank) {
      arguments.parts[rank] = input(request, whole ? 0 : rank);
    }
    auto* const start = algorithm == AlgorithmName::kLowLatency ? cuda::low_latency_reduce
                        : algorithm == AlgorithmName::kPacket   ? cuda::packet_reduce_scatter
                                                                : cuda::push_reduce_scatter;
    start(launch, arguments, request.dtype, request.reduce_op);
  }

  void exchange(Launch& launch, const dpt_request& request, const DevicePlan& plan) const {
    const AlgorithmName algorithm = plan.algorithm;
    if (algorithm == AlgorithmName::kRing) return go_round(launch, request);
    ExchangeArguments arguments{};
    const int me = group_.rank;
    const size_t element = size_of(request.dtype);
    const auto bytes_of = [&](const size_t* counts, int index) {
      return (counts != nullptr ? counts[index] : request.count) * element;
    };
    for (int rank = 0; rank < group_.layout.size; ++rank) {
      const bool from_me = request.root == me;
      const bool from_it = request.root == rank;
      switch (request.collective) {
        case DPT_ALL_GATHER:
          send(&arguments, rank, input(request, 0), request.count * element);
          receive(&arguments, rank, output(request, rank), bytes_of(request.output_counts, rank));
          break;
        case DPT_ALL_TO_ALL:
          send(&arguments, rank, input(request, rank), bytes_of(request.input_counts, rank));
          receive(&arguments, rank, output(request, rank), bytes_of(request.output_counts, rank));
          break;
        case DPT_BROADCAST:
          if (from_me) send(&arguments, rank, input(request, 0), request.count * element);
          if (from_it) receive(&arguments, rank, output(request, 0), request.count * element);
          break;
        case DPT_SCATTER:
          if (from_me) send(&arguments, rank, input(request, rank), request.count * element);
          if (from_it) receive(&arguments, rank, output(request, 0), request.count * element);
          break;
        case DPT_GATHER:
          if (from_it) send(&arguments, rank, input(request, 0), request.count * element);
          if (from_me) receive(&arguments, rank, output(request, rank), request.count * element);
          break;
        default:
          throw Error(DPT_ERR_INTERNAL,
                      std::string("no device kernel for ") + name_of(request.collective));
      }
    }
    for (int rank = 0; rank < group_.layout.size; ++rank) {
      if (takes_landings(arguments.receive[rank], arguments.receive_bytes[rank])) {
        launch.call.landings |= 1u << rank;
      }
    }
    count_landings(launch);
    auto* const start = algorithm == AlgorithmName::kLowLatency ? cuda::low_latency_exchange
                        : algorithm == AlgorithmName::kPacket   ? cuda::packet_exchange
                                                                : cuda::push_exchange;
    start(launch, arguments);
  }
  void go_round(Launch& launch, const dpt_request& request) const {
    const bool gathers = request.collective == DPT_ALL_GATHER;
    const int size = group_.layout.size;
    RingArguments arguments{};
    arguments.bytes = request.count * size_of(request.dtype);
    arguments.first_origin = gathers ? 0 : request.root;
    arguments.num_origins = gathers ? size : 1;
    if (gathers || request.root == group_.rank) arguments.input = input(request, 0);
    for (int rank = 0; rank < size; ++rank) {
      if (!gathers && rank != request.root) continue;
      char* const to = arguments.output[rank] = output(request, gathers ? rank : 0);
      if (takes_landings(to, arguments.bytes)) launch.call.landings |= 1u << rank;
    }
    count_landings(launch);
    cuda::ring_exchange(launch, arguments);
  }
  static void send(ExchangeArguments* arguments, int rank, const char* from, uint64_t bytes) {
    arguments->send[rank] = from;
    arguments->send_bytes[rank] = bytes;
  }
  static void receive(ExchangeArguments* arguments, int rank, char* to, uint64_t bytes) {
    arguments->receive[rank] = to;
    arguments->receive_bytes[rank] = bytes;
  }

  int device_;
  cudaStream_t last_stream_ = nullptr;
  MappedStatus status_;
  std::vector<DeviceMemory> blocks_;
  std::unique_ptr<staged::Group> copies_;
  const cuda::DevicePool* pool_;  // nullptr: nothing lands in this rank's outputs
  cuda::DevicePool::Peers pools_;
  cuda::Wiring wiring_;
  cuda::Trees trees_;
  cuda::GroupView group_{};
};

// A rank tells the others this before memory is exchanged.
struct Hello {
  std::string address;  // of its socket; empty when it can't take part
  uint32_t slot_bytes = 0;
  int channels = 0;
  bool copies = false;  // there is room for what copy engines need
  std::string why_not;

  std::string serialize() const {
    return (address.empty() ? "-" : address) + " " + std::to_string(slot_bytes) + " " +
           std::to_string(channels) + " " + (copies ? "1 " : "0 ") +
           why_not.substr(0, DeviceGroup::kMostWords / 2);
  }
  static Hello parse(const std::string& text) {
    Hello hello;
    std::istringstream words(text);
    words >> hello.address >> hello.slot_bytes >> hello.channels >> hello.copies;
    std::getline(words, hello.why_not);
    if (hello.address == "-") hello.address.clear();
    return hello;
  }
};

// Hands this rank's block to every neighbour and takes theirs.
std::vector<DeviceMemory> exchange_blocks(const DeviceGroup::Setup& setup,
                                          const std::vector<Hello>& peers,
                                          const KeyedSocket& listener,
                                          DeviceMemory own) {
  const int size = static_cast<int>(peers.size());
  std::vector<UniqueFd> sockets(size);
  int neighbours = 0;
  for (int rank = 0; rank < size; ++rank) {
    if (!is_neighbour(setup, rank)) continue;
    sockets[rank] = connect_abstract(peers[rank].address, setup.wait);
    ++neighbours;
  }
  const UniqueFd file = own.export_file();
  for (int served = 0; served < neighbours;) {
    const UniqueFd peer = accept_within(listener, setup.wait.deadline.next_slice());
    if (peer.get() >= 0) {
      send_fds(peer, std::to_string(setup.rank), {file.get()});
      ++served;
      continue;
    }
    setup.wait.check();
    if (setup.wait.deadline.expired()) {
      throw Error(DPT_ERR_SYSTEM, "a rank did not fetch this rank's device memory");
    }
  }
  std::vector<DeviceMemory> blocks(size);
  for (int rank = 0; rank < size; ++rank) {
    if (!is_neighbour(setup, rank)) continue;
    await_acceptance(sockets[rank], setup.wait);
    const Received received = receive_fds(sockets[rank], setup.wait);
    if (received.text != std::to_string(rank) || received.fds.size() != 1) {
      throw Error(DPT_ERR_SYSTEM, "a local process sent a malformed greeting");
    }
    blocks[rank] = DeviceMemory::import(setup.device, received.fds.front(), own.bytes());
  }
  blocks[setup.rank] = std::move(own);
  return blocks;
}

std::string name_rank(const DeviceGroup::Setup& setup, size_t rank) {
  return "rank " + std::to_string(setup.global_ranks[rank]);
}

// All ranks learn of any rank's trouble and give it up together.
void agree(const DeviceGroup::Setup& setup, const std::string& trouble) {
  const std::vector<std::string> troubles =
      setup.all_gather(trouble.substr(0, DeviceGroup::kMostWords / 2));
  for (size_t rank = 0; rank < troubles.size(); ++rank) {
    if (!troubles[rank].empty()) {
      throw Error(DPT_ERR_SYSTEM, name_rank(setup, rank) + ": " + troubles[rank]);
    }
  }
}

// nullptr, on all ranks alike, where there are no slots or drivers can't do it: kernels serve.
std::unique_ptr<staged::Group> connect_copies(const DeviceGroup::Setup& setup,
                                              std::vector<char*> slots) {
  if (slots.empty()) return nullptr;
  try {
    return staged::Group::connect(
        {.ranks = membership_of(setup),
         .global_ranks = setup.global_ranks,
         .staging_bytes = setup.staging_bytes,
         .threads = 1,
         .cpus = setup.workers.cpus,
         .oversubscribed = setup.workers.oversubscribed,
         .all_gather = setup.all_gather,
         .wait = setup.wait,
         .make_engine =
             [&setup] { return cuda::make_copy_engine(setup.device, cuda::Slots::kOnDevices); },
         .slots = std::move(slots),
         .slot_bytes = kCopySlot});
  } catch (const Error& error) {
    if (error.status() != DPT_ERR_SYSTEM) throw;
    return nullptr;
  }
}

// The ranks' registered memory. A group does without it, on all ranks alike, where it can't be had.
cuda::DevicePool::Peers connect_pools(const DeviceGroup::Setup& setup) {
  cuda::DevicePool::Peers peers;
  if (setup.wiring == cuda::Wiring::kPartial) {
    peers.why_not = "not all of its GPUs reach each other's memory";
  } else {
    peers = cuda::DevicePool::join({setup.rank,
                                    static_cast<int>(setup.global_ranks.size()),
                                    setup.device,
                                    setup.all_gather,
                                    setup.wait});
  }
  if (peers.bases.empty()) {
    log(LogLevel::kInfo,
        "registered device memory goes the way of ordinary memory in a group: " + peers.why_not);
  }
  return peers;
}

}  // namespace

std::string DeviceGroup::why_absent() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess && devices > 0) return "";
  cudaGetLastError();
  return std::string("no CUDA device: ") + cudaGetErrorString(error);
}

uint64_t DeviceGroup::capture_of(cuda::Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess ||
      status == cudaStreamCaptureStatusNone) {
    return 0;
  }
  unsigned long long id = 0;
  DPT_CUDA_CHECK(cudaStreamGetCaptureInfo(
      static_cast<cudaStream_t>(stream), &status, &id, nullptr, nullptr, nullptr, nullptr));
  return id;
}

bool DeviceGroup::has_ended(void* event) {
  const cuda::RelaxedCapture relaxed;
  if (cudaEventQuery(static_cast<cudaEvent_t>(event)) == cudaSuccess) return true;
  cudaGetLastError();  // "not ready" is no failure of anything
  return false;
}

void DeviceGroup::outside_capture(int device, const std::function<void()>& task) {
  const cuda::RelaxedCapture relaxed;
  const cuda::DeviceScope scope(device);
  task();
}

void DeviceGroup::after_fork() { cuda::DevicePool::after_fork(); }

int DeviceGroup::peer_mappings() { return DeviceMemory::imported(); }
uint64_t DeviceGroup::landing_calls() { return landing_calls_made; }

std::unique_ptr<DeviceGroup> DeviceGroup::connect(const Setup& setup) {
  if (!setup.peer_access) {
    return connect_staged(setup, [&setup] {
      if (const std::string absent = why_absent(); !absent.empty()) {
        throw Error(DPT_ERR_SYSTEM, absent);
      }
      return cuda::make_copy_engine(setup.device, cuda::Slots::kOnHost);
    });
  }
  const cuda::RelaxedCapture relaxed;
  const int size = static_cast<int>(setup.global_ranks.size());
  Hello hello;
  KeyedSocket listener;
  try {
    if (size > kMaxRanks) {
      throw Error(
          DPT_ERR_SYSTEM,
          std::to_string(size) + " ranks; GPU kernels serve up to " + std::to_string(kMaxRanks));
    }
    if (const std::string absent = why_absent(); !absent.empty()) {
      throw Error(DPT_ERR_SYSTEM, absent);
    }
    static std::once_flag loaded;
    const cuda::DeviceScope scope(setup.device);
    std::call_once(loaded, cuda::load_kernels);
    hello.slot_bytes = layout_for(setup).slot_bytes;
    hello.channels = setup.channels;
    hello.copies = setup.wiring != cuda::Wiring::kPartial &&
                   layout_for(setup).block_bytes() + kCopySlots <= setup.staging_bytes;
    if (hello.slot_bytes == 0) throw Error(DPT_ERR_SYSTEM, "staging_mb is used up by other groups");
    listener = listen_abstract(&hello.address);
  } catch (const Error& error) {
    hello.address.clear();
    hello.why_not = error.what();
  }
  std::vector<Hello> peers;
  for (const std::string& words : setup.all_gather(hello.serialize())) {
    peers.push_back(Hello::parse(words));
  }
  uint32_t slot_bytes = hello.slot_bytes;
  int channels = hello.channels;
  bool copies = true;
  for (size_t rank = 0; rank < peers.size(); ++rank) {
    if (peers[rank].address.empty()) {
      throw Error(DPT_ERR_SYSTEM, name_rank(setup, rank) + ":" + peers[rank].why_not);
    }
    slot_bytes = std::min(slot_bytes, peers[rank].slot_bytes);
    channels = std::min(channels, peers[rank].channels);
    copies &= peers[rank].copies;
  }
  const Layout layout = Layout::of(size, slot_bytes, channels, setup.nvlink);

  std::string trouble;
  DeviceMemory own;
  try {
    own = DeviceMemory::allocate(setup.device, layout.block_bytes() + (copies ? kCopySlots : 0));
  } catch (const Error& error) {
    trouble = error.what();
  }
  agree(setup, trouble);
  std::vector<DeviceMemory> blocks;
  try {
    blocks = exchange_blocks(setup, peers, listener, std::move(own));
  } catch (const Error& error) {
    trouble = error.what();
  }
  agree(setup, trouble);
  const cuda::DeviceScope scope(setup.device);
  std::vector<char*> slots;
  if (copies) {
    for (const DeviceMemory& block : blocks)
      slots.push_back(block.address() + layout.block_bytes());
  }
  auto engines = connect_copies(setup, std::move(slots));
  return std::make_unique<ConnectedDeviceGroup>(
      setup, layout, std::move(blocks), std::move(engines), connect_pools(setup));
}

}  // namespace dpt
