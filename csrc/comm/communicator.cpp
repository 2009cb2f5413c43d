#include "comm/communicator.hpp"

#include "comm/fabric.hpp"
#include "comm/flight_record.hpp"

namespace dpt {
namespace {

// How long destroying a group waits for operations that nobody waited for.
constexpr std::chrono::milliseconds kDestroyGrace{5000};

}  // namespace

Communicator::Communicator(const dpt_comm_options& options,
                           std::unique_ptr<Store> store,
                           const dpt_delegate& delegate)
    : store_(std::move(store)),
      facts_(options, delegate),
      state_(facts_),
      delegation_(facts_, state_, progress_),
      bootstrap_(facts_,
                 state_,
                 progress_,
                 *store_,
                 [this](const WaitContext& wait) { host_.agree(wait); }),
      device_(options, {facts_, state_, order_, delegation_, bootstrap_, progress_}),
      host_(options, {facts_, state_, order_, delegation_, bootstrap_, progress_}),
      messages_(facts_, state_, delegation_, bootstrap_) {
  Fabric::instance();  // from here on a fork() is noticed
  bootstrap_.open();
}

Communicator::~Communicator() {
  bootstrap_.close();
  if (!messages_.drain(kDestroyGrace)) {
    abort("group " + facts_.name + " was destroyed on rank " +
          std::to_string(facts_.global_rank()) + " with a send or receive under way");
  }
  messages_.end();
  if (!progress_.drain(kDestroyGrace)) {
    abort("group " + facts_.name + " was destroyed on rank " +
          std::to_string(facts_.global_rank()) + " with an operation under way");
    progress_.drain(kDestroyGrace);
  }
  FlightRecord::instance().close_group(facts_.record_group);
  device_.leave();
  state_.leave();
}

dpt_outcome Communicator::submit(const dpt_request& request, dpt_done done, void* done_context) {
  FlightRecord& record = FlightRecord::instance();
  uint64_t recorded = 0;
  dpt_outcome outcome = DPT_COMPLETED;
  try {
    outcome = route(request, done, done_context, &recorded);
  } catch (...) {
    record.end(recorded, FlightRecord::kFailed);
    throw;
  }
  if (request.recorded != nullptr) *request.recorded = recorded;
  const bool on_stream = outcome == DPT_COMPLETED && request.on_device != 0;
  if (outcome == DPT_COMPLETED) {
    record.end(recorded, on_stream ? FlightRecord::kIssued : FlightRecord::kEnded);
  } else if (outcome == DPT_DELEGATED && request.recorded == nullptr) {
    // Else who holds the delegate's handle tells of its end.
    record.end(recorded, FlightRecord::kIssued);
  }
  return outcome;
}

dpt_outcome Communicator::route(const dpt_request& request,
                                dpt_done done,
                                void* done_context,
                                uint64_t* recorded) {
  if (is_message(request.collective)) {
    return messages_.submit(request, done, done_context, recorded);
  }
  if (request.on_device != 0) return device_.submit(request, recorded);
  return host_.submit(request, done, done_context, recorded);
}

bool Communicator::retire() { return !delegation_.is_ahead() && bootstrap_.retire(); }

void Communicator::abort(const std::string& reason) { state_.fail(DPT_ERR_ABORTED, reason); }

}  // namespace dpt
