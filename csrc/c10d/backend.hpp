// The c10d backend "deepytorch": c10d's interface, and the owner of a group's parts. It checks
// arguments and describes each operation, which `submission_` takes from there. No collective is
// carried out here.
//
// Locks: it has none of its own, each part says what guards it. No part calls another with a lock
// held. Thread safety: as c10d asks: any thread, operations in call order.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "calling_lines.hpp"
#include "coalescing.hpp"
#include "delegates.hpp"
#include "delegation.hpp"
#include "device.hpp"
#include "group_setup.hpp"
#include "native_group.hpp"
#include "registered.hpp"
#include "replay.hpp"
#include "submission.hpp"

namespace dpt::c10d_adapter {

class Backend : public c10d::Backend {
 public:
  using Options = GroupOptions;

  explicit Backend(GroupSetup setup);
  ~Backend() override;

  // Ends the native part of every group of this process, after what is under way. It is called at
  // the interpreter's end. A progress thread that lets go of a tensor later would ask for a lock
  // that no longer exists, and take the process down.
  static void finish_all();

  // c10d does not tell a backend the device of a barrier; in a group that serves no CPU tensors it
  // is the accelerator's, whose stream only the stock backend waits for.
  void serve_accelerator_only(const std::string& device) { barrier_device_ = at::Device(device); }

  // Ends the native part and nothing else, until `rejoin`: the group is not to be ours any more,
  // and may be again.
  void leave();
  void rejoin();

  const std::string getBackendName() const override { return setup_.options->backend; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  void setTimeout(Milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  // Without messages, of which each rank may have another number: torch compares this between ranks
  // where TORCH_DISTRIBUTED_DEBUG=DETAIL.
  uint64_t getSequenceNumberForGroup() override { return native_.num_collectives(); }
  // Torch asks this before it sends a batch of messages as one call. On the host nothing is gained
  // by that, and its batches are neither safe with threads nor after a failure.
  bool supportsCoalescing() const override;
  void startCoalescing() override { coalescing_.start(); }
  WorkPtr endCoalescing() override { return coalescing_.end(); }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Registered memory, which collectives of local ranks use without a copy. It belongs to the
  // process: the tensor may outlive the group.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return memory_.allocate(size, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex index) override;

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors,
                           const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs,
                    std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output,
                          at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                              std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs,
                         std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output,
                               at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs,
                 std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(std::vector<at::Tensor>& outputs,
                  std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output,
                        at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(std::vector<at::Tensor>& outputs,
                   std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

 private:
  WorkPtr submit(Call&& call, const Replay& replay) {
    return submission_.submit(std::move(call), replay);
  }
  WorkPtr receive(std::vector<at::Tensor>& tensors, int peer, int tag, const Replay& replay);
  // Throws unless it is a rank of the group. `op`: the operation, for the message.
  void check_root(const char* op, int64_t root) const;
  // Ends the native part. Whether the delegates were abandoned.
  bool end_native();
  // Calls the program's hook, once.
  void tell_closed();

  GroupSetup setup_;                      // first: see [Gloo's layout]
  at::Device barrier_device_ = at::kCPU;  // set when the group is made, if at all
  DeviceStreams streams_{setup_.api};
  Delegates delegates_{setup_};
  Coalescing coalescing_{setup_};
  Delegation delegation_{setup_, delegates_, coalescing_, streams_};
  NativeGroup native_{setup_, delegation_.table()};
  CallingLines calling_lines_{setup_.api};
  Submission submission_{{setup_, native_, delegation_, coalescing_, calling_lines_}, streams_};
  RegisteredMemory memory_{setup_, delegates_};
};

}  // namespace dpt::c10d_adapter
