// Collectives of a group that spans nodes, in two stages on stock backends of a part of its ranks.
// `local` has the ranks of this node, `rail` those of the same place on every node. A message then
// crosses the network once for each node, on all rails at a time. In a ring it would cross once for
// each rank's turn. (Hierarchical collectives: e.g. Thakur et al., "Optimization of Collective
// Communication Operations in MPICH", 2005.)
//
// With N nodes of L ranks each:
//   all_gather      rail all_gather: this place's parts of all nodes, and meanwhile a local
//                   all_gather of the own node's; then one for each other node's
//   reduce_scatter  for each node's parts a local reduce_scatter; then a rail reduce_scatter
//   all_reduce      local reduce_scatter, rail all_reduce, local all_gather
//   all_to_all      local all_to_all: what is for a place goes to the rank that has it here; then a
//                   rail all_to_all, of as many bytes in one message to each node instead of L
//
// Long reduce_scatters and all_reduces go in pieces, so that the rails carry one while the node is
// at the next. Every rank begins the same operations of both groups in the same order.
//
// Thread safety: as c10d asks: any thread, operations in call order.
#pragma once

#include <functional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "deepytorch.h"
#include "device.hpp"

namespace dpt::c10d_adapter {

class Hierarchy : public c10d::Backend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  struct Setup {
    int rank;
    BackendPtr flat;  // of all ranks
    BackendPtr local;
    BackendPtr rail;
    std::vector<int> node_of;  // by rank; equally many ranks on each node
    size_t piece_bytes;        // a rail's message that is at least as long as two goes in pieces
    const dpt_api* api;
  };

  explicit Hierarchy(Setup setup);

  const std::string getBackendName() const override { return "deepytorch, by nodes"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options) override;
  // Takes equal parts, as everything here.
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs,
                    std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output,
                          at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs,
                         std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output,
                               at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output,
                        at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;

 private:
  struct Piece {
    int64_t begin;  // in elements
    int64_t length;
  };

  int num_nodes() const { return static_cast<int>(ranks_.size()); }
  int num_local() const { return static_cast<int>(ranks_[0].size()); }
  // Whether the node's ranks follow each other, so that their parts are one piece of a tensor.
  bool is_one_piece(int node) const;
  // The pieces of a rail's message of `count` elements, in order; none of none.
  std::vector<Piece> pieces_of(int64_t count, size_t element_bytes) const;
  // An all_gather and a reduce_scatter of one tensor.
  void gather_in_stages(const at::Tensor& output,
                        const at::Tensor& input,
                        const c10d::AllgatherOptions& options);
  void reduce_in_stages(const at::Tensor& output,
                        const at::Tensor& input,
                        const c10d::ReduceScatterOptions& options);
  // Runs the stages on a stream behind the caller's, or for host memory here.
  WorkPtr run(c10d::OpType op_type,
              bool asynchronous,
              const std::vector<at::Tensor>& tensors,
              const std::vector<at::Tensor>& results,
              const std::function<void()>& stages);

  Setup setup_;
  std::vector<std::vector<int>> ranks_;  // of each node, ascending; nodes by their first rank
  int node_ = 0;                         // this rank's, an index of `ranks_`
  uint64_t sequence_ = 0;
  DeviceStreams streams_;
};

}  // namespace dpt::c10d_adapter
