#include "submission.hpp"

namespace dpt::c10d_adapter {

[[gnu::hot]] WorkPtr Submission::submit(Call&& call, const Replay& replay) {
  parts_.native.check_open(call.title);
  call.note_given(parts_.setup.size);
  if (lists_.is_only_asked_for(call)) return nullptr;
  checks_.compare(call);
  const uint64_t sequence = parts_.native.count(call.is_message());
  checks_.inspect(call, sequence, parts_.native.comm());
  if (call.results.empty()) call.results = call.outputs;
  if (!call.device().is_cuda()) return host_.submit(std::move(call), replay, sequence);
  if (WorkPtr work; device_.start_known(call, replay, &work)) {
    return parts_.coalescing.is_open() ? parts_.coalescing.note(std::move(work), call) : work;
  }
  return device_.submit(std::move(call), replay, sequence);
}

void Submission::run_on_delegate(Call&& call, const Replay& replay, const char* why) {
  parts_.native.check_open(call.title);
  host_.run_on_delegate(std::move(call), replay, why);
}

}  // namespace dpt::c10d_adapter
