// One group of ranks: takes requests in order, picks a plan for each, runs it.
//
// Lifecycle: construction waits for nobody; the ranks meet at the first operation that can be
// native
// (`connect`), and agree there whether this group has a native transport at all. Once an operation
// failed in a way that leaves the ranks out of step (a dead rank, a timeout, Ctrl-C) the group is
// failed for good: every later call says so and why.
// Thread safety: all public functions from any thread; `submit` calls are serialised.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "algorithms/nodes.hpp"
#include "base/error.hpp"
#include "bootstrap/exchange.hpp"
#include "bootstrap/store.hpp"
#include "comm/calibration.hpp"
#include "comm/delegation.hpp"
#include "comm/flight_record.hpp"
#include "comm/group_bootstrap.hpp"
#include "comm/group_facts.hpp"
#include "comm/group_state.hpp"
#include "comm/host_collectives.hpp"
#include "comm/known_delegated.hpp"
#include "comm/lost_rank.hpp"
#include "comm/messages.hpp"
#include "comm/progress.hpp"
#include "comm/statistics.hpp"
#include "comm/submit_order.hpp"
#include "cuda/device_group.hpp"
#include "staged/internode_sender.hpp"
#include "transport/shm/segment.hpp"

namespace dpt {

class Communicator {
 public:
  Communicator(const dpt_comm_options& options,
               std::unique_ptr<Store> store,
               const dpt_delegate& delegate);
  ~Communicator();

  dpt_outcome submit(const dpt_request& request, dpt_done done, void* done_context);
  // NOTE [Short way]: what dpt_api says of them.
  bool begin_known(const dpt_request& request, dpt_known* begun);
  dpt_status fail_known(const dpt_request& request,
                        uint64_t recorded,
                        dpt_status status,
                        const dpt_error& error);
  void begin_coalesced(const dpt_request* requests, size_t count, uint64_t* recorded, int* begun);
  void abort(const std::string& reason);
  // Instead of the destructor, where peers may yet need this rank to join; see NOTE [Retired
  // groups]. False: nobody does. The store and the delegate are not used after this.
  bool retire();

 private:
  // `recorded`: receives the operation's number in the flight record, as soon as it has one.
  dpt_outcome route(const dpt_request& request,
                    dpt_done done,
                    void* done_context,
                    uint64_t* recorded);
  // Operations on GPUs, in communicator_device.cpp.
  struct DeviceState {
    int device;
    std::string why_not;                 // not empty: the delegate serves this group's GPUs
    std::unique_ptr<DeviceGroup> group;  // unless there is a reason why not
    bool staged = false;                 // through the host's memory
    size_t staging_bytes = 0;
    bool by_nodes = false;  // the delegate may go through this group's nodes in stages
  };
  dpt_outcome submit_device(const dpt_request& request, uint64_t* recorded);
  void launch_on_device(const dpt_request& request, const DevicePlan& plan);
  bool is_staged() const;
  std::string why_not_staged(const dpt_request& request) const;
  DeviceGroup::Workers workers_near(const RunContext& context, const std::vector<int>& cpus) const;
  std::string why_not_on_device(const dpt_request& request) const;
  std::string why_not_in_group(const dpt_request& request) const;
  bool is_open_on_device(const dpt_request& request) const;
  // `lasts`: whether it is the same for all requests like this one from now on.
  DevicePlan plan_on_device(const dpt_request& request, bool* lasts);
  std::optional<DevicePlan> settled_plan(const dpt_request& request);
  StatisticsRow* row_of_delegated(const dpt_request& request);
  // Runs `task` with what it needs to meet the other ranks, in turn with the group's operations on
  // host memory, which share its signals.
  void run_in_turn(const dpt_request& request, const std::function<void(const WaitContext&)>& task);
  void settle_on_device(const dpt_request& request, size_t bytes);
  void settle_between_nodes(const dpt_request& request, const WaitContext& wait);
  void refuse_without_descriptors(const WaitContext& wait);
  void join_devices(const dpt_request& request);
  std::vector<int64_t> ranks_here() const;
  void connect_devices(int device, const WaitContext& wait, DeviceState* state);
  // Whether nodes have equally many ranks, and this holds for all of them.
  bool are_alike(const WaitContext& wait, bool mine) const;
  // Whether all ranks want GPUs to go through the hosts' memory and between nodes.
  bool wants_staging_by_nodes(const WaitContext& wait) const;
  // Whether every rank's delegate can go through the nodes in stages.
  bool can_go_by_nodes(const WaitContext& wait) const;
  // Whether it may, by the rule or where that measures faster: device_->by_nodes.
  void agree_on_stages(const WaitContext& wait);
  bool watch_device();
  bool watch_delegate();
  // Abandons NCCL's part where errors are raised and it may wait without end.
  void abandon_delegate() const;
  Error error_of(const DeviceGroup::Failure& failure) const;
  void check_device(const dpt_request& request);
  bool is_device_broken() const;
  void check_segment(const dpt_request& request);
  void leave_devices();

  std::unique_ptr<Store> store_;
  const GroupFacts facts_;
  // The short way looks at these.
  SubmitOrder order_;
  GroupState state_;
  const Transports& transports_;
  Delegation delegation_;
  GroupBootstrap bootstrap_;
  KnownDelegated known_delegated_;  // guarded by order_

  HostCollectives host_;
  GroupTuning device_tuning_;  // once device_ is there
  Messages messages_;
  std::unique_ptr<DeviceState> device_;  // made by the first operation on a GPU
  LostRank lost_;                        // of the watchdog's thread

  Progress progress_;  // last: its thread uses everything above
};

}  // namespace dpt
