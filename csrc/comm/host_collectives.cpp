#include "comm/host_collectives.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string_view>

#include "algorithms/block_sizes.hpp"
#include "comm/flight_record.hpp"
#include "comm/measure.hpp"
#include "host/reduce.hpp"

namespace dpt {
namespace {

// Every node's header must fit into the smallest slot.
constexpr int kMostNodes = 96;

// The same on every rank, also when parts are uneven. All ranks of an all_gather know all parts. An
// all_to_all works with whatever each rank takes for its size.
size_t bytes_to_choose_by(const Operation& operation, int size) {
  size_t most = operation.bytes();
  if (operation.collective == DPT_ALL_GATHER && operation.is_uneven()) {
    for (int rank = 0; rank < size; ++rank) most = std::max(most, operation.output_bytes(rank));
  }
  return most;
}

bool is_delegate(const Plan& plan) { return plan.algorithm == AlgorithmName::kDelegate; }

}  // namespace

HostCollectives::HostCollectives(const dpt_comm_options& options, const GroupParts& parts)
    : facts_(parts.facts),
      state_(parts.state),
      transports_(parts.state.transports()),
      order_(parts.order),
      delegation_(parts.delegation),
      bootstrap_(parts.bootstrap),
      progress_(parts.progress),
      tuning_(options, parts.facts.delegate) {}

void HostCollectives::agree(const WaitContext& wait) {
  tuning_.agree(*transports_.segment, transports_.nodes.get(), transports_.oversubscribed, wait);
}

dpt_outcome HostCollectives::submit(const dpt_request& request,
                                    dpt_done done,
                                    void* done_context,
                                    uint64_t* recorded) {
  std::unique_lock order(order_.mutex);
  state_.check_usable(request);
  *recorded = facts_.record(request);
  if (std::string reason = facts_.why_never_native(request); !reason.empty()) {
    order.unlock();
    return delegation_.start(request, {.reason = std::move(reason)}, *recorded);
  }
  std::shared_ptr<Pending> pending = make_pending(request);
  pending->recorded = *recorded;
  if (request.asynchronous) {
    // The first operation also meets the other ranks, or tunes with them, and that too must not
    // hold up the caller: ranks may start the operations of several groups in different orders.
    if (state_.is_connected() && !transports_.segment) {
      pending->plan = plan_for(pending->operation);
      if (is_delegate(pending->plan)) {
        order.unlock();
        return delegation_.start(request, pending->plan, *recorded);
      }
    }
    enqueue(std::move(pending), done, done_context);
    return DPT_STARTED;
  }
  run_and_wait(pending);
  if (!is_delegate(pending->plan)) return DPT_COMPLETED;
  order.unlock();
  return delegation_.start(request, pending->plan, *recorded);
}

std::string HostCollectives::why_not_native(const Operation& operation) const {
  if (!transports_.why_none.empty()) return transports_.why_none;
  if (operation.reduce_op != DPT_NO_REDUCE && !can_reduce(operation.dtype, operation.reduce_op)) {
    return std::string("no native ") + name_of(operation.reduce_op) + " of " +
           name_of(operation.dtype);
  }
  if (transports_.nodes && transports_.nodes->num_nodes() > kMostNodes) {
    return "more than " + std::to_string(kMostNodes) + " nodes";
  }
  if (transports_.nodes && !BlockSizes::fit(operation.collective, transports_.nodes->layout)) {
    return std::string("an ") + name_of(operation.collective) + " of so many ranks between nodes";
  }
  return "";
}

bool HostCollectives::undecided(const Operation& operation) const {
  if (!state_.is_connected()) return true;
  const size_t bytes = bytes_to_choose_by(operation, facts_.size());
  if (!tuning_.is_open(operation.collective, bytes) || !why_not_native(operation).empty()) {
    return false;
  }
  return !transports_.nodes || !is_small_between_nodes(choose_request(operation));
}

Plan HostCollectives::plan_for(const Operation& operation) const {
  return choose(choose_request(operation));
}

ChooseRequest HostCollectives::choose_request(const Operation& operation) const {
  const int size = facts_.size();
  const size_t bytes = bytes_to_choose_by(operation, size);
  return {.collective = operation.collective,
          .bytes = bytes,
          .size = size,
          .not_native = why_not_native(operation),
          .fixed_chunk_bytes = transports_.fixed_chunk_bytes,
          .max_chunk_bytes = transports_.segment ? transports_.segment->max_chunk_bytes() : 0,
          .oversubscribed = transports_.oversubscribed,
          .nodes = transports_.num_nodes(),
          .uneven = operation.is_uneven(),
          .tuned = tuning_.find(operation.collective, bytes)};
}

void HostCollectives::prepare(Pending& pending, bool in_caller) {
  bootstrap_.connect(wait_context(pending, in_caller));
  if (undecided(pending.operation)) {
    const WaitContext wait = wait_context(pending, in_caller);
    try {
      const size_t bytes = bytes_to_choose_by(pending.operation, facts_.size());
      HostBench bench(tuning_.group(), tuning_.rival());
      tuning_.settle({*transports_.segment,
                      pending.operation,
                      pending.plan,
                      wait,
                      transports_.wait_style(bytes, in_caller),
                      transports_.nodes.get()},
                     bytes,
                     bench);
    } catch (const Error& error) {
      state_.fail_operation(error, wait);
    }
  }
  pending.plan = plan_for(pending.operation);
}

std::shared_ptr<HostCollectives::Pending> HostCollectives::make_pending(
    const dpt_request& request) {
  auto pending = std::make_shared<Pending>();
  const int size = facts_.size();
  const bool is_root = facts_.rank == request.root;
  const int inputs = num_inputs(request.collective, is_root, size);
  const int outputs = num_outputs(request.collective, is_root, size);
  auto keep = [](auto* to, const auto* from, int count) {
    if (from != nullptr) to->assign(from, from + count);
  };
  keep(&pending->inputs, request.inputs, inputs);
  keep(&pending->outputs, request.outputs, outputs);
  keep(&pending->input_counts, request.input_counts, inputs);
  keep(&pending->output_counts, request.output_counts, outputs);
  pending->operation = {
      .collective = request.collective,
      .dtype = request.dtype,
      .reduce_op = request.reduce_op,
      .premul_factor = request.premul_factor,
      .root = request.root,
      .count = request.count,
      .inputs = pending->inputs.data(),
      .outputs = pending->outputs.data(),
      .input_counts = request.input_counts ? pending->input_counts.data() : nullptr,
      .output_counts = request.output_counts ? pending->output_counts.data() : nullptr,
      .sequence = order_.next_sequence++};
  pending->call = request.call;
  pending->timeout = std::chrono::milliseconds(request.timeout_ms);
  return pending;
}

WaitContext HostCollectives::wait_context(const Pending& pending, bool interruptible) const {
  return {Deadline(pending.timeout),
          [this, &pending] { return pending.operation.describe() + " of " + facts_.place(); },
          interruptible ? facts_.interrupted : nullptr};
}

void HostCollectives::run(const Pending& pending, bool in_caller) {
  const auto start = std::chrono::steady_clock::now();
  const Operation& operation = pending.operation;
  const WaitContext wait = wait_context(pending, in_caller);
  try {
    if (!transports_.segment) {
      if (is_delegate(pending.plan)) return;
      run_local(operation);
    } else {
      transports_.segment->throw_if_aborted();
      const RunContext context{*transports_.segment,
                               operation,
                               pending.plan,
                               wait,
                               transports_.wait_style(operation.bytes(), in_caller),
                               transports_.nodes.get(),
                               transports_.arrivals};
      if (!is_delegate(pending.plan)) {
        FlightRecord::instance().note(pending.recorded, FlightRecord::kNative);
      }
      // NOTE [Gate] A rank that delegates enters the group's signals first. So a peer which runs
      // the same call natively (another dtype, say) is told of the mismatch.
      if (is_delegate(pending.plan))
        return transports_.nodes ? enter_nodes(context) : enter_small(context);
      const Algorithm* algorithm = find_algorithm(pending.plan.algorithm, operation.collective);
      DPT_CHECK(algorithm != nullptr);
      algorithm->run(context);
    }
  } catch (const Error& error) {
    state_.fail_operation(error, wait);
  }
  if (transports_.nodes && !operation.is_uneven()) {
    facts_.statistics->note_between_nodes({pending.plan.algorithm,
                                           operation.collective,
                                           operation.dtype,
                                           operation.root,
                                           operation.count,
                                           pending.plan.chunk_bytes});
  }
  const auto end = std::chrono::steady_clock::now();
  FlightRecord::instance().end(pending.recorded, FlightRecord::kEnded, end);
  const std::chrono::duration<double, std::micro> elapsed = end - start;
  facts_.statistics->add(operation.collective,
                         pending.plan.algorithm,
                         pending.plan.reason.c_str(),
                         operation.bytes(),
                         elapsed.count());
}

void HostCollectives::enqueue(std::shared_ptr<Pending> pending, dpt_done done, void* done_context) {
  const bool may_delegate =
      undecided(pending->operation) || is_delegate(plan_for(pending->operation));
  if (may_delegate) delegation_.expect();
  struct Outcome {
    dpt_status status = DPT_OK;
    dpt_error error{};
  };
  auto outcome = std::make_shared<Outcome>();
  const auto operation = [this, pending, outcome, may_delegate] {
    dpt_status& status = outcome->status;
    try {
      prepare(*pending, /*in_caller=*/false);
      run(*pending, /*in_caller=*/false);
      if (is_delegate(pending->plan)) {
        status = delegation_.run(
            pending->operation, pending->plan, {pending->call, pending->recorded}, &outcome->error);
      }
    } catch (const Error& caught) {
      status = caught.status();
      set_message(&outcome->error, caught.what());
    }
    if (may_delegate) delegation_.settle();
    FlightRecord::instance().end(pending->recorded,
                                 status == DPT_OK ? FlightRecord::kEnded : FlightRecord::kFailed);
  };
  progress_.enqueue(operation, [outcome, done, done_context] {
    done(done_context, outcome->status, outcome->error.message);
  });
}

void HostCollectives::run_and_wait(std::shared_ptr<Pending> pending) {
  const bool inline_now = progress_.try_run_inline([&] {
    prepare(*pending, /*in_caller=*/true);
    run(*pending, /*in_caller=*/true);
  });
  if (inline_now) return;

  struct Waiter {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::optional<Error> error;
  };
  auto waiter = std::make_shared<Waiter>();
  progress_.enqueue([this, pending, waiter] {
    std::optional<Error> error;
    try {
      prepare(*pending, /*in_caller=*/false);
      run(*pending, /*in_caller=*/false);
    } catch (const Error& caught) {
      error = caught;
    }
    std::lock_guard lock(waiter->mutex);
    waiter->error = error;
    waiter->done = true;
    waiter->changed.notify_all();
  });
  std::unique_lock lock(waiter->mutex);
  bool interrupted = false;
  while (!waiter->changed.wait_for(lock, kWaitSlice, [&] { return waiter->done; })) {
    if (interrupted || !facts_.interrupted) continue;
    lock.unlock();
    interrupted = facts_.interrupted();
    // The operation uses the caller's memory: it must end before we return.
    if (interrupted)
      state_.fail(DPT_ERR_INTERRUPTED,
                  wait_context(*pending, false).describe() + " was interrupted");
    lock.lock();
  }
  if (interrupted) {
    throw Error(DPT_ERR_INTERRUPTED, wait_context(*pending, false).describe() + " was interrupted");
  }
  if (waiter->error) throw *waiter->error;
}

}  // namespace dpt
