// One group of ranks: owns its parts, and takes requests in order to the one that serves them.
//
// Lifecycle: construction waits for nobody. The ranks meet at the first operation that can be
// native, and agree there whether the group has a native transport at all
// (comm/group_bootstrap.hpp). A failure that leaves them out of step ends the group for good
// (comm/group_state.hpp).
//
// Locks: it has none of its own, each part says what guards it. The order of submission
// (comm/submit_order.hpp) is the outermost. Inside it the fabric's may be taken, and inside both
// the group's state. The locks of progress and messages have none of the communicator's inside; the
// thread that listens for invitations takes progress's with the invitations' held.
// Thread safety: all public functions from any thread.
#pragma once

#include <memory>
#include <string>

#include "bootstrap/store.hpp"
#include "comm/delegation.hpp"
#include "comm/device_collectives.hpp"
#include "comm/group_bootstrap.hpp"
#include "comm/group_facts.hpp"
#include "comm/group_state.hpp"
#include "comm/host_collectives.hpp"
#include "comm/messages.hpp"
#include "comm/progress.hpp"
#include "comm/submit_order.hpp"

namespace dpt {

class Communicator {
 public:
  Communicator(const dpt_comm_options& options,
               std::unique_ptr<Store> store,
               const dpt_delegate& delegate);
  // Ends the parts in this order: invitations, messages, what is under way, devices, transports.
  ~Communicator();

  dpt_outcome submit(const dpt_request& request, dpt_done done, void* done_context);
  // NOTE [Short way]: what dpt_api says of them.
  bool begin_known(const dpt_request& request, dpt_known* begun) {
    return device_.begin_known(request, begun);
  }
  dpt_status fail_known(const dpt_request& request,
                        uint64_t recorded,
                        dpt_status status,
                        const dpt_error& error) {
    return device_.fail_known(request, recorded, status, error);
  }
  void begin_coalesced(const dpt_request* requests, size_t count, uint64_t* recorded, int* begun) {
    device_.begin_coalesced(requests, count, recorded, begun);
  }
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

  std::unique_ptr<Store> store_;
  const GroupFacts facts_;
  // The short way looks at these, which therefore lie side by side.
  SubmitOrder order_;
  GroupState state_;
  Delegation delegation_;
  GroupBootstrap bootstrap_;
  DeviceCollectives device_;

  HostCollectives host_;
  Messages messages_;
  Progress progress_;  // last: its threads use everything above
};

}  // namespace dpt
