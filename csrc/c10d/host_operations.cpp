#include "host_operations.hpp"

#include <ATen/record_function.h>

#include "in_collective.hpp"
#include "python_bridge.hpp"

namespace dpt::c10d_adapter {

WorkPtr HostOperations::submit(Call&& what, const Replay& replay, uint64_t sequence) {
  if (what.device().is_cpu()) what.note_written();
  const InCollective counted;
  std::optional<std::string> not_native;
  if (what.not_native != nullptr) not_native = what.not_native;
  if (!not_native) not_native = why_not_host(what.inputs);
  if (!not_native && !what.in_place) not_native = why_not_host(what.outputs);
  if (!parts_.setup.core.native || not_native) {
    Submitted submitted(std::move(what), replay);
    hand_over(submitted, not_native);
    return parts_.coalescing.note(parts_.delegation.watched(submitted), submitted.call);
  }
  // Lives until the operation has ended: the core hands it to the delegate if it comes to that.
  const auto submitted = std::make_shared<Submitted>(std::move(what), replay);
  submitted->keep();
  const Call& call = submitted->call;

  using Direction = Contiguous::Direction;
  const auto inputs = std::make_shared<Contiguous>(
      call.inputs, call.in_place ? call.in_place_direction(parts_.setup.rank) : Direction::kInput);
  const auto outputs =
      call.in_place ? inputs : std::make_shared<Contiguous>(call.outputs, Direction::kOutput);
  const std::vector<void*> input_pointers = inputs->pointers();
  const std::vector<void*> output_pointers = outputs->pointers();
  dpt_request request = submitted->describe(parts_.setup.limit_of(call.timeout));
  request.inputs = input_pointers.data();
  request.outputs = output_pointers.data();
  request.asynchronous = call.asynchronous || parts_.coalescing.is_open() || handles_signals();
  // The line is looked for first, as what runs here is over when the core returns.
  std::optional<CodeLine> line;
  if (request.asynchronous == 0 && parts_.calling_lines.is_due(request))
    line = CallingLines::find();
  const dpt_place place = line ? place_of(*line) : dpt_place{};
  if (line) request.place = &place;

  NativeWork::Options work_options{parts_.setup.rank,
                                   call.op_type,
                                   call.title,
                                   parts_.setup.profiled_as(call.title, at::kCPU),
                                   sequence,
                                   call.results.vec(),
                                   parts_.setup.hooks.explain};
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
  parts_.native.submit(request, submitted->failure, work, &outcome);
  work->record_as(parts_.setup.api, submitted->recorded);
  if (request.asynchronous != 0) parts_.calling_lines.note(request, submitted->recorded);
  WorkPtr result = work;
  if (outcome == DPT_COMPLETED) work->complete(DPT_OK, "");
  if (outcome == DPT_DELEGATED) result = parts_.delegation.watched(*submitted);
  return parts_.coalescing.note(result, call);
}

void HostOperations::hand_over(Submitted& submitted, const std::optional<std::string>& not_native) {
  dpt_request request = submitted.describe(parts_.setup.limit_of(submitted.call.timeout));
  request.not_native = not_native ? not_native->c_str() : nullptr;
  request.asynchronous |= parts_.coalescing.is_open() ? 1 : 0;
  dpt_outcome outcome = DPT_DELEGATED;
  parts_.native.submit(request, submitted.failure, nullptr, &outcome);
  parts_.calling_lines.note(request, submitted.recorded);
}

void HostOperations::run_on_delegate(Call&& call, const Replay& replay, const char* why) {
  Submitted submitted(std::move(call), replay);
  hand_over(submitted, why);
  parts_.setup.api->record_end(submitted.recorded, DPT_OK, /*on_stream=*/0);
}

}  // namespace dpt::c10d_adapter
