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

// Every backend that is alive, for finish_all.
std::mutex live_mutex;
std::set<Backend*>& live() {
  static auto* const backends = new std::set<Backend*>;
  return *backends;
}

}  // namespace

Backend::Backend(GroupSetup setup)
    : c10d::Backend(setup.rank, setup.size), setup_(std::move(setup)) {
  init();
  native_.make();
  const std::lock_guard lock(live_mutex);
  live().insert(this);
}

Backend::~Backend() {
  {
    const std::lock_guard lock(live_mutex);
    live().erase(this);
  }
  // Delegates end their threads too, and one of those may be waiting for Python's lock.
  without_gil([&] {
    native_.destroy();
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
  native_.abort("the process group was aborted (ProcessGroup.abort)");
  delegates_.abort();
}

bool Backend::end_native() {
  native_.end();
  bool are_abandoned = false;
  without_gil([&] { are_abandoned = delegates_.settle(); });
  return are_abandoned;
}

void Backend::leave() { end_native(); }

void Backend::rejoin() {
  if (!native_.is_open()) without_gil([&] { native_.make(); });
}

void Backend::tell_closed() {
  if (const auto closed = std::exchange(setup_.hooks.closed, nullptr)) closed();
}

void Backend::shutdown() {
  const bool are_abandoned = end_native();
  without_gil([&] {
    delegates_.shutdown(are_abandoned);
    tell_closed();
  });
}

void Backend::finish_all() {
  std::set<Backend*> backends;
  {
    const std::lock_guard lock(live_mutex);
    backends = live();
  }
  for (Backend* backend : backends) backend->end_native();
}

[[gnu::hot]] WorkPtr Backend::submit(Call what, const Replay& replay) {
  native_.check_open(what.title);
  what.note_given(size_);
  if (askers_.load(std::memory_order_relaxed) != 0 && is_only_asked_for(what)) return nullptr;
  checks_.compare(what);
  const uint64_t sequence = native_.count(what.is_message());
  checks_.inspect(what, sequence, native_.comm());
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
  native_.submit(request, submitted->failure, work, &outcome);
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
  native_.submit(request, submitted.failure, nullptr, &outcome);
  calling_lines_.note(request, submitted.recorded);
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

}  // namespace dpt::c10d_adapter
