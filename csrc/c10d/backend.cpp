// The road every operation takes: Call -> dpt_request -> core -> NativeWork or the delegate's Work.
// The c10d entry points that build the calls are in collectives.cpp and point_to_point.cpp.
#include "backend.hpp"

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

#include "in_collective.hpp"
#include "python_bridge.hpp"
#include "store.hpp"
#include "submitted.hpp"

namespace dpt::c10d_adapter {
namespace {

// Ctrl-C raised this inside a wait of the core; picked up when that wait has returned.
thread_local std::exception_ptr pending_signal;

// How long rank 0 stays for ranks that are still making the group; they are at it together.
constexpr std::chrono::seconds kMakingLimit{5};
constexpr const char* kMadeKey = "deepytorch/made/";

// Every backend that is alive, for finish_all.
std::mutex live_mutex;
std::set<Backend*>& live() {
  static auto* const backends = new std::set<Backend*>;
  return *backends;
}

void on_done(void* context, dpt_status status, const char* message) {
  const auto work = c10::intrusive_ptr<NativeWork>::reclaim(static_cast<NativeWork*>(context));
  work->complete(status, message);
}

}  // namespace

Backend::Backend(GroupSetup setup)
    : c10d::Backend(setup.rank, setup.size), setup_(std::move(setup)) {
  init();
  make_comm();
  const std::lock_guard lock(live_mutex);
  live().insert(this);
}

void Backend::make_comm() {
  std::vector<int64_t> global_ranks;
  for (const uint64_t rank : setup_.options->global_ranks_in_group) {
    global_ranks.push_back(static_cast<int64_t>(rank));
  }
  if (global_ranks.empty()) {
    for (int rank = 0; rank < size_; ++rank) global_ranks.push_back(rank);
  }
  DPT_CHECK_VALUE(global_ranks.size() == static_cast<size_t>(size_),
                  {std::to_string(global_ranks.size()),
                   " global ranks for a group of ",
                   std::to_string(size_)});
  const dpt_comm_options options{setup_.options->group_name.c_str(),
                                 rank_,
                                 size_,
                                 global_ranks.data(),
                                 setup_.core.native ? 1 : 0,
                                 poll_signals,
                                 nullptr,
                                 setup_.core.tune,
                                 setup_.core.profile.c_str(),
                                 setup_.core.staging_bytes,
                                 setup_.core.raise_errors ? 1 : 0,
                                 setup_.hooks.explain ? explain_failure : nullptr,
                                 this};
  const dpt_store store = store_table(setup_.store.get());
  const dpt_delegate delegate = delegation_.table();
  dpt_error error{};
  const dpt_status status = setup_.api->comm_create(&options, &store, &delegate, &comm_, &error);
  if (status != DPT_OK) std::rethrow_exception(make_exception(status, error.message));
  if (rank_ != 0) setup_.store->set(kMadeKey + std::to_string(rank_), std::vector<uint8_t>{1});
}

Backend::~Backend() {
  {
    const std::lock_guard lock(live_mutex);
    live().erase(this);
  }
  // Delegates end their threads too, and one of those may be waiting for Python's lock.
  without_gil([&] {
    if (comm_ != nullptr) setup_.api->comm_destroy(comm_);
    delegates_.settle();
    delegates_.clear();
    tell_closed();
  });
}

c10::intrusive_ptr<c10d::Backend::Options> Backend::getBackendOptions() {
  return c10::static_intrusive_pointer_cast<c10d::Backend::Options>(setup_.options);
}

bool Backend::supportsCoalescing() const { return at::hasCUDA(); }

void Backend::setTimeout(Milliseconds timeout) {
  timeout = std::min(timeout, kLongestWait);
  setup_.options->timeout = timeout;
  delegates_.set_timeout(timeout);
}

c10d::ErrorType Backend::getError() { return delegates_.error(); }

void Backend::abort() {
  if (comm_ != nullptr) {
    setup_.api->comm_abort(comm_, "the process group was aborted (ProcessGroup.abort)");
  }
  delegates_.abort();
}

void Backend::explain_failure(void* context, const char* failure, char* sentence, size_t bytes) {
  std::snprintf(
      sentence, bytes, "%s", static_cast<Backend*>(context)->setup_.hooks.explain(failure).c_str());
}

void Backend::let_others_make_it() {
  static std::atomic<bool> somebody_is_lost{false};  // and won't come for other groups either
  if (rank_ != 0 || sequence_ > 0 || comm_ == nullptr || made_in_ != ::getpid()) return;
  if (somebody_is_lost) return;
  std::vector<std::string> made;
  for (int rank = 1; rank < size_; ++rank) made.push_back(kMadeKey + std::to_string(rank));
  without_gil([&] { somebody_is_lost = !wait_for_keys(*setup_.store, made, kMakingLimit); });
}

bool Backend::end_comm() {
  let_others_make_it();
  dpt_comm* const comm = std::exchange(comm_, nullptr);
  bool abandoned = false;
  without_gil([&] {
    if (comm != nullptr) setup_.api->comm_destroy(comm);
    abandoned = delegates_.settle();
  });
  return abandoned;
}

void Backend::leave() { end_comm(); }

void Backend::rejoin() {
  if (comm_ == nullptr) without_gil([&] { make_comm(); });
}

void Backend::tell_closed() {
  if (const auto closed = std::exchange(setup_.hooks.closed, nullptr)) closed();
}

void Backend::shutdown() {
  const bool abandoned = end_comm();
  without_gil([&] {
    delegates_.shutdown(abandoned);
    tell_closed();
  });
}

void Backend::finish_all() {
  std::set<Backend*> backends;
  {
    const std::lock_guard lock(live_mutex);
    backends = live();
  }
  for (Backend* backend : backends) backend->end_comm();
}

int Backend::poll_signals(void*) {
  pending_signal = run_signal_handlers();
  return pending_signal != nullptr;
}

[[gnu::hot]] WorkPtr Backend::submit(Call what, const Replay& replay) {
  check_open(what);
  what.note_given(size_);
  if (askers_.load(std::memory_order_relaxed) != 0 && is_only_asked_for(what)) return nullptr;
  checks_.compare(what);
  const uint64_t sequence = ++sequence_;
  if (what.is_message()) ++messages_;
  checks_.inspect(what, sequence, comm_);
  if (what.results.empty()) what.results = what.outputs;
  const at::Device device = what.device();
  if (device.is_cuda()) {
    if (WorkPtr work; start_known(what, replay, &work)) {
      return coalescing_.is_open() ? coalescing_.note(std::move(work), what) : work;
    }
    // On its stream, or handed to the delegate, when this returns.
    Submitted submitted(std::move(what), replay);
    submitted.on_device = this;
    return coalescing_.note(submit_on_device(submitted, sequence), submitted.call);
  }
  if (device.is_cpu()) what.note_written();
  const InCollective counted;
  std::optional<std::string> not_native;
  if (what.not_native != nullptr) not_native = what.not_native;
  if (!not_native) not_native = why_not_host(what.inputs);
  if (!not_native && !what.in_place) not_native = why_not_host(what.outputs);
  if (!setup_.core.native || not_native) {
    Submitted submitted(std::move(what), replay);
    hand_over(submitted, not_native);
    return coalescing_.note(delegation_.watched(submitted), submitted.call);
  }
  // Lives until the operation has ended: the core hands it to the delegate if it comes to that.
  const auto submitted = std::make_shared<Submitted>(std::move(what), replay);
  submitted->keep();
  const Call& call = submitted->call;

  using Direction = Contiguous::Direction;
  const auto inputs = std::make_shared<Contiguous>(
      call.inputs, call.in_place ? call.in_place_direction(rank_) : Direction::kInput);
  const auto outputs =
      call.in_place ? inputs : std::make_shared<Contiguous>(call.outputs, Direction::kOutput);
  const std::vector<void*> input_pointers = inputs->pointers();
  const std::vector<void*> output_pointers = outputs->pointers();
  dpt_request request = submitted->describe(setup_.limit_of(call.timeout));
  request.inputs = input_pointers.data();
  request.outputs = output_pointers.data();
  request.asynchronous = call.asynchronous || coalescing_.is_open() || handles_signals();
  // Before, as what runs here is over when submit_to_core returns.
  std::optional<CodeLine> line;
  if (request.asynchronous == 0 && calling_lines_.is_due(request)) line = CallingLines::find();
  const dpt_place place = line ? place_of(*line) : dpt_place{};
  if (line) request.place = &place;

  NativeWork::Options work_options{rank_,
                                   call.op_type,
                                   call.title,
                                   setup_.profiled_as(call.title, at::kCPU),
                                   sequence,
                                   call.results.vec(),
                                   setup_.hooks.explain};
  work_options.finalize = [inputs, outputs, submitted] {
    if (submitted->delegated) return;  // the delegate wrote to the tensors themselves
    outputs->copy_back();
    if (submitted->call.after) submitted->call.after();
  };
  work_options.source = call.source;
  work_options.delegate_failure = [submitted] { return submitted->failure; };
  std::optional<std::vector<at::Tensor>> profiled;
  if (at::hasCallbacks()) {
    profiled = (call.shown.empty() ? call.inputs : call.shown).vec();
  }
  auto work = c10::make_intrusive<NativeWork>(std::move(work_options), profiled);

  dpt_outcome outcome = DPT_COMPLETED;
  submit_to_core(request, *submitted, work, &outcome);
  work->record_as(setup_.api, submitted->recorded);
  if (request.asynchronous != 0) calling_lines_.note(request, submitted->recorded);
  WorkPtr result = work;
  if (outcome == DPT_COMPLETED) work->complete(DPT_OK, "");
  if (outcome == DPT_DELEGATED) result = delegation_.watched(*submitted);
  return coalescing_.note(result, call);
}

// On host memory, what is the delegate's whatever the core thinks of it: the call returns when that
// has it.
void Backend::hand_over(Submitted& submitted, const std::optional<std::string>& not_native) {
  dpt_request request = submitted.describe(setup_.limit_of(submitted.call.timeout));
  request.not_native = not_native ? not_native->c_str() : nullptr;
  request.asynchronous |= coalescing_.is_open() ? 1 : 0;
  dpt_outcome outcome = DPT_DELEGATED;
  submit_to_core(request, submitted, nullptr, &outcome);
  calling_lines_.note(request, submitted.recorded);
}

void Backend::check_open(const Call& call) const {
  if (comm_ != nullptr) return;
  std::rethrow_exception(make_exception(DPT_ERR_ABORTED,
                                        join_text({"deepytorch: ",
                                                   call.title,
                                                   ": process group ",
                                                   setup_.options->group_name,
                                                   " was destroyed"})));
}

void Backend::check_root(const char* op, int64_t root) const {
  DPT_CHECK_VALUE(root >= 0 && root < size_,
                  {op,
                   " on rank ",
                   std::to_string(rank_),
                   ": root ",
                   std::to_string(root),
                   " is not a rank of this group of ",
                   std::to_string(size_)});
}

void Backend::submit_to_core(const dpt_request& request,
                             const Submitted& submitted,
                             c10::intrusive_ptr<NativeWork> work,
                             dpt_outcome* outcome) {
  dpt_error error;  // a kilobyte that is rarely needed
  error.message[0] = '\0';
  dpt_status status = DPT_OK;
  // The completion callback owns one reference, given back here if it will not be called.
  NativeWork* const context = work.release();
  without_gil(
      [&] { status = setup_.api->submit(comm_, &request, on_done, context, outcome, &error); });
  if (context != nullptr && (status != DPT_OK || *outcome != DPT_STARTED)) {
    c10::intrusive_ptr<NativeWork>::reclaim(context);
  }
  if (status == DPT_ERR_INTERRUPTED && pending_signal) {
    std::rethrow_exception(std::exchange(pending_signal, nullptr));
  }
  if (status != DPT_OK) throw_failure(status, submitted.failure, error);
}

[[gnu::cold, gnu::noinline]] void Backend::throw_failure(dpt_status status,
                                                         const std::exception_ptr& delegates,
                                                         const dpt_error& error) const {
  note_failure();
  if (status == DPT_ERR_DELEGATE) std::rethrow_exception(delegates);
  std::rethrow_exception(
      make_exception(status, explained(setup_.hooks.explain, status, error.message)));
}

}  // namespace dpt::c10d_adapter
