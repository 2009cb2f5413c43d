// Operations of the stock backends: the core asks for them by dpt_delegate, and what is known to be
// theirs is started directly.
//
// Thread safety: it holds no lock. The program's threads and the core's start operations in the
// order of the calls. A thread of the core asks what a stream waits for, which DelegatedStream
// guards.
#pragma once

#include <memory>

#include "coalescing.hpp"
#include "delegated_work.hpp"
#include "delegates.hpp"
#include "device.hpp"
#include "submitted.hpp"

namespace dpt::c10d_adapter {

class Delegation {
 public:
  Delegation(const GroupSetup& setup,
             Delegates& delegates,
             Coalescing& coalescing,
             DeviceStreams& streams);
  Delegation(const Delegation&) = delete;
  Delegation& operator=(const Delegation&) = delete;

  // Gives the core its way to this object.
  dpt_delegate table();
  // Starts an operation from the caller's stream. `node_of`: see dpt_delegate.
  WorkPtr start_on_device(const at::Device& device,
                          const Replay& replay,
                          const int* node_of,
                          bool asynchronous);
  // Gives the delegate's work as the caller gets it.
  WorkPtr watched(const Submitted& submitted) const;
  // Tells the core what the stock backend threw. It is called in the handler of that exception.
  static dpt_status describe_caught(const at::Device& device, dpt_error* error);

 private:
  // The functions of dpt_delegate; `context` is this object, `call` a Submitted.
  static dpt_status start(void* context, void* call, dpt_error* error);
  static dpt_status start_by_nodes(void* context, void* call, const int* node_of, dpt_error* error);
  static dpt_status run(void* context, void* call, dpt_error* error);
  static dpt_status execute(void* context, const dpt_request* request, dpt_error* error);
  static dpt_waits is_waiting(void* context);
  static void abandon(void* context);

  const GroupSetup& setup_;
  Delegates& delegates_;
  Coalescing& coalescing_;
  DeviceStreams& streams_;
  DelegatedStream stream_{setup_.api};
  const std::shared_ptr<const DelegatedWork::Group> works_of_;
};

}  // namespace dpt::c10d_adapter
