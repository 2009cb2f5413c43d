// Tensors in registered memory: what torch asks a backend for as allocate_tensor (FSDP2's
// communication buffers, DDP's buckets).
//
// Thread safety: it holds no state of its own; any thread.
#pragma once

#include "delegates.hpp"
#include "group_setup.hpp"

namespace dpt::c10d_adapter {

class RegisteredMemory {
 public:
  RegisteredMemory(const GroupSetup& setup, Delegates& delegates)
      : setup_(setup), delegates_(delegates) {}

  // Whether there is any of the core's on host memory.
  bool is_on_host() const { return setup_.core.native && setup_.size > 1; }
  // Whether there is any on this accelerator: the process's own, or what NCCL allocates.
  bool is_on_device(c10::DeviceIndex index) const;
  // `size` elements, content undefined. Throws where there is no such memory.
  at::Tensor allocate(int64_t size, const at::TensorOptions& options) const;

 private:
  // As long as nobody has timed whole trainings with it, it is for who asks for native collectives.
  bool has_device_memory() const;

  const GroupSetup& setup_;
  Delegates& delegates_;
};

}  // namespace dpt::c10d_adapter
