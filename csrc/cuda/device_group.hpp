// The GPUs of one group of ranks: their staging memory, mapped by all of them, and the way to start
// a kernel on it.
//
// Lifecycle: `connect` is called by all ranks together, of one node unless they are staged. Once a
// kernel gave up (a peer that did not come, a mismatch) or `abort` was called the group has failed
// for good. Thread safety: `launch` by one thread at a time; `abort` and `failure` from any.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/wait.hpp"
#include "cuda/arguments.hpp"
#include "cuda/trees/trees.hpp"
#include "staged/start_hooks.hpp"
#include "transport/node_layout.hpp"

namespace dpt {

namespace staged {
struct Between;
}

class DeviceGroup {
 public:
  // Threads of this process that reduce where there is no peer access.
  struct Workers {
    int threads = 1;
    std::vector<int> cpus = {};  // near the device; empty: unknown
    bool oversubscribed = false;
  };

  struct Setup {
    int rank;
    const std::vector<int64_t>& global_ranks;
    int device;            // as this process numbers them
    size_t staging_bytes;  // most memory for this group: the device's, or the host's in between
    int channels;          // most of its kernels
    bool nvlink;           // between all ranks
    // Every rank's text, in rank order. Of at most kMostWords bytes.
    std::function<std::vector<std::string>(const std::string&)> all_gather;
    const WaitContext& wait;
    bool peer_access = true;  // false: memory of peers is not to be mapped
    Workers workers = {};
    // For a group that spans nodes, which is staged through the hosts' memory.
    NodeLayout layout = {};
    std::shared_ptr<staged::Between> between = nullptr;
    // Whether peers may write to this rank's outputs. Not where the program goes on after a
    // failure: a peer that has not noticed yet would write to what the memory is used for by then.
    bool lands = false;
    // Unless links are alike: the trees that they were packed into. Where some two ranks don't
    // reach each other's memory there is no kernel but the one that goes along these.
    cuda::Wiring wiring = cuda::Wiring::kAlike;
    cuda::Trees trees = {};
    uint32_t neighbours = ~0u;  // ranks whose memory this one reaches and who reach its, as bits
  };
  static constexpr size_t kMostWords = 240;

  // Empty, or why there are no GPU kernels in this process: built without them, no driver.
  static std::string why_absent();
  // The capture of a graph that the stream is part of; 0: none.
  static uint64_t capture_of(cuda::Stream stream);
  // Whether a cudaEvent_t that no graph captured has come; false also where CUDA can't say.
  static bool has_ended(void* event);
  // Runs with that GPU what has nothing to do with a graph that any thread captures.
  static void outside_capture(int device, const std::function<void()>& task);
  // In a forked child: closes what it inherited.
  static void after_fork();
  // How often this process mapped a peer's device memory.
  static int peer_mappings();
  // How many of this process's operations let peers write to their outputs.
  static uint64_t landing_calls();
  // Throws Error(DPT_ERR_SYSTEM), on every rank alike, where a rank's memory can't be reached.
  static std::unique_ptr<DeviceGroup> connect(const Setup& setup);
  virtual ~DeviceGroup() = default;

  virtual const cuda::Layout& layout() const = 0;
  virtual cuda::Wiring wiring() const { return cuda::Wiring::kAlike; }
  // For a group without peer access: then the layout has no channels.
  virtual cuda::Staging staging() const { return {}; }
  // The part of copy engines in a group that has kernels, if they can (AlgorithmName::kCopyEngine).
  virtual cuda::Staging copies() const { return {}; }
  virtual size_t memory_bytes() const { return layout().block_bytes(); }
  // Starts `request` on `stream`, where its buffers are ready, and returns. `hooks` are for
  // requests that go by copies. In a staged group, `hooks.beside` puts on `stream` what runs beside
  // `request`, once nothing that serves `request` waits any more for what comes on `stream`. The
  // stream goes on behind both.
  virtual void launch(const dpt_request& request,
                      const DevicePlan& plan,
                      cuda::Stream stream,
                      const staged::StartHooks& hooks) = 0;

  struct Failure {
    enum Kind { kTimeout, kMismatch, kAborted };
    Kind kind;
    int peer;           // rank in the group that it waited for
    uint32_t sequence;  // of the operation, among the group's native ones on the device
  };
  // The failure that a kernel recorded when it gave up.
  virtual std::optional<Failure> failure() const = 0;
  // Kernels under way give up, later ones do nothing.
  virtual void abort() = 0;
  // The same of what waits for another rank now or later; the rest comes to its end.
  virtual void stop_waiting() { abort(); }
  // Kernels that gave up hold their stream, for some seconds at most; now they end.
  virtual void release() = 0;
};

}  // namespace dpt
