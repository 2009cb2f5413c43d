// The meeting of a group's ranks on their devices. They agree there whose memory reaches whose, how
// much of it the group gets, and how operations go between nodes.
//
// Locks: it takes none and has none. It lives while the ranks meet, in the group's turn and with
// the order of submission held.
#pragma once

#include <cstdint>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "comm/calibration.hpp"
#include "comm/group_bootstrap.hpp"
#include "comm/group_facts.hpp"
#include "comm/joined_device.hpp"
#include "comm/transports.hpp"

namespace dpt {

class DeviceMeeting {
 public:
  // All ranks have a segment.
  DeviceMeeting(const GroupFacts& facts,
                const Transports& transports,
                GroupTuning& tuning,
                const WaitContext& wait);

  // Joins joined->device, or says why the delegate serves it. Throws Error, DPT_ERR_SYSTEM on every
  // rank alike.
  void connect(GroupBootstrap& bootstrap, JoinedDevice* joined);
  // Both in a group that spans nodes. The first sets whether the delegate may go through them in
  // stages, by the rule or where that measures faster: joined->by_nodes.
  void agree_on_stages(JoinedDevice* joined);
  void settle_between_nodes(const dpt_request& request,
                            const JoinedDevice& joined,
                            uint64_t* next_sequence);

 private:
  // Whether nodes have equally many ranks, and this holds for all of them.
  bool are_alike(bool mine) const;
  // Whether all ranks want GPUs to go through the hosts' memory and between nodes.
  bool wants_staging_by_nodes() const;
  // Whether every rank's delegate can go through the nodes in stages.
  bool can_go_by_nodes() const;
  std::vector<int64_t> ranks_here() const;
  DeviceGroup::Workers workers_near(const std::vector<int>& cpus) const;
  // A place to meet for this node's ranks, or for all.
  RunContext context_here() const;
  RunContext context() const;

  const GroupFacts& facts_;
  const Transports& transports_;
  GroupTuning& tuning_;
  const WaitContext& wait_;
  Operation none_{};
  const Plan plan_;
};

}  // namespace dpt
