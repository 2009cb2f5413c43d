// This process's registered memory on a GPU: what collectives' kernels may write results to from
// other ranks' GPUs, because peers have it mapped (transport/shm/chunk_pool.hpp). PyTorch's caching
// allocator takes it from here by the chunk (bindings/device_memory.cpp).
//
// Lifecycle: a pool lives as long as the process. Thread safety: all functions from any thread.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/wait.hpp"

namespace dpt {
class ChunkPool;
class PeerRange;
}  // namespace dpt

namespace dpt::cuda {

class DevicePool {
 public:
  // The device is numbered as in this process. Throws Error(DPT_ERR_SYSTEM) if there is none.
  static DevicePool& of(int device);

  // One chunk; nullptr: the device has no more. Throws Error(DPT_ERR_SYSTEM) where such memory
  // can't be had at all.
  char* allocate(size_t bytes);
  // Waits for what runs on the device, and a moment for the peers. Not a chunk: does nothing.
  void free(char* address) noexcept;

  // Whether all of it lies in chunks that every process of every group has mapped. Makes no system
  // call.
  bool is_shared(const void* address, size_t bytes) const;
  // The start of the range of addresses that all chunks lie in; nullptr before the first need.
  char* base() const;
  size_t chunk_bytes() const;
  size_t shared_bytes() const;

  // The ranks of a group on one node, which all call this at the same time.
  struct Meeting {
    int rank;
    int size;
    int device;
    std::function<std::vector<std::string>(const std::string&)> all_gather;
    const WaitContext& wait;
  };
  struct Peers {
    // By rank, where its pool lies here. Empty, on all ranks alike: there is no registered memory
    // in this group, and why_not says why.
    std::vector<char*> bases;
    std::vector<std::shared_ptr<PeerRange>> ranges;  // to be kept as long as the bases are used
    std::string why_not;
    std::shared_ptr<const void> use;  // of the links to the peers, to be kept likewise
  };
  static Peers join(const Meeting& meeting);

  // In a forked child.
  static void after_fork();

 private:
  explicit DevicePool(ChunkPool* chunks) : chunks_(chunks) {}

  ChunkPool* const chunks_;
};

}  // namespace dpt::cuda
