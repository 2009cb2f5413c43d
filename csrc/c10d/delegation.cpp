#include "delegation.hpp"

#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace dpt::c10d_adapter {

Delegation::Delegation(const GroupSetup& setup,
                       Delegates& delegates,
                       Coalescing& coalescing,
                       DeviceStreams& streams)
    : setup_(setup),
      delegates_(delegates),
      coalescing_(coalescing),
      streams_(streams),
      works_of_(std::make_shared<const DelegatedWork::Group>(
          DelegatedWork::Group{setup.rank,
                               setup.api,
                               setup.hooks.explain,
                               setup.options->group_name,
                               setup.stock.who_died})) {}

dpt_delegate Delegation::table() {
  return {this,
          start,
          run,
          setup_.stock.competes ? execute : nullptr,
          setup_.stock.make_by_nodes ? start_by_nodes : nullptr,
          is_waiting,
          abandon};
}

dpt_status Delegation::start(void* context, void* call, dpt_error* error) {
  return start_by_nodes(context, call, nullptr, error);
}

dpt_status Delegation::start_by_nodes(void* context,
                                      void* call,
                                      const int* node_of,
                                      dpt_error* error) {
  Delegation& delegation = *static_cast<Delegation*>(context);
  auto* submitted = static_cast<Submitted*>(call);
  const at::Device device = submitted->device();
  try {
    if (!device.is_cuda()) {
      const Milliseconds own = submitted->call.timeout;
      const Milliseconds limit =
          own == c10d::kUnsetTimeout ? Milliseconds{} : std::max(own, Milliseconds(1));
      submitted->delegated = delegation.coalescing_.start_on(
          delegation.delegates_.of(device, limit), *submitted->replay);
      return DPT_OK;
    }
    submitted->delegated = delegation.start_on_device(
        device, *submitted->replay, node_of, submitted->call.asynchronous);
    return DPT_OK;
  } catch (...) {
    // The delegate's own exception is what the caller gets; the core only needs to know.
    submitted->failure = std::current_exception();
    return describe_caught(device, error);
  }
}

[[gnu::hot]] WorkPtr Delegation::start_on_device(const at::Device& device,
                                                 const Replay& replay,
                                                 const int* node_of,
                                                 bool asynchronous) {
  // Coalesced operations start where they end: on the caller's stream.
  const auto [current, from] =
      streams_.before_delegated(device, asynchronous && !coalescing_.is_open());
  const DelegatedStream::Call starting(stream_, current);
  c10::OptionalStreamGuard there;
  if (from != current) there.reset_stream(from);
  // Operations that belong together for NCCL stay in one piece.
  const bool staged = node_of != nullptr && !coalescing_.is_open();
  return coalescing_.start_on(staged ? delegates_.by_nodes("cuda", node_of) : delegates_.of(device),
                              replay);
}

dpt_status Delegation::run(void* context, void* call, dpt_error* error) {
  const dpt_status status = start(context, call, error);
  auto* submitted = static_cast<Submitted*>(call);
  if (status != DPT_OK || !submitted->delegated) return status;
  try {
    submitted->delegated->wait();
    return DPT_OK;
  } catch (...) {
    submitted->failure = std::current_exception();
    return DPT_ERR_DELEGATE;
  }
}

dpt_waits Delegation::is_waiting(void* context) {
  try {
    return static_cast<Delegation*>(context)->stream_.is_waiting();
  } catch (const std::exception&) {
    return DPT_WAITS_NOT;  // the device is in trouble of its own, which the program hears of
  }
}

void Delegation::abandon(void* context) {
  Delegation& delegation = *static_cast<Delegation*>(context);
  delegation.delegates_.abandon([&delegation] { return delegation.stream_.is_starting(); });
}

WorkPtr Delegation::watched(const Submitted& submitted) const {
  const WorkPtr& work = submitted.delegated;
  // The host can't see the end of this, or it is the work of an open group of calls.
  if (!work || !submitted.device().is_cpu()) {
    setup_.api->record_end(submitted.recorded, DPT_OK, /*on_stream=*/1);
    return work;
  }
  return c10::make_intrusive<DelegatedWork>(
      work,
      DelegatedWork::Watch{
          works_of_, submitted.call.op_type, submitted.call.title, submitted.recorded});
}

}  // namespace dpt::c10d_adapter
