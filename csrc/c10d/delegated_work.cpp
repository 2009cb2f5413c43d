#include "delegated_work.hpp"

#include "convert.hpp"
#include "in_collective.hpp"

namespace dpt::c10d_adapter {

DelegatedWork::DelegatedWork(c10::intrusive_ptr<c10d::Work> work, Watch watch)
    : c10d::Work(watch.group->rank, watch.op_type),
      work_(std::move(work)),
      watch_(std::move(watch)) {}

DelegatedWork::~DelegatedWork() {
  // Nobody waited: its end stays unknown where it has not come yet.
  watch_.group->api->record_end(watch_.recorded, DPT_OK, work_->isCompleted() ? 0 : 1);
}

bool DelegatedWork::isCompleted() {
  if (!work_->isCompleted()) return false;
  ended(work_->isSuccess() ? DPT_OK : DPT_ERR_DELEGATE);
  return true;
}

bool DelegatedWork::wait(std::chrono::milliseconds timeout) {
  const InCollective counted;
  watch_.group->api->record_wait(watch_.recorded);
  try {
    const bool done = work_->wait(std::min(timeout, kLongestWait));
    ended(DPT_OK);
    return done;
  } catch (const std::exception& error) {
    const std::exception_ptr failure = std::current_exception();
    // With a limit of the caller's own the operation may still be under way.
    if (timeout == kNoTimeout || work_->isCompleted()) {
      note_failure();
      ended(DPT_ERR_DELEGATE);
    }
    // The stock backend's own errors say which socket broke. Where it refused its arguments none
    // did, and looking for the dead would take a while.
    const std::string said = text_of(error);
    const bool broke = said.find("transport") != said.npos || said.find("onnection") != said.npos;
    const Group& group = *watch_.group;
    if (const std::string who = broke ? group.who_died() : ""; !who.empty()) {
      const std::string text = join_text({watch_.title,
                                          " of group ",
                                          group.name,
                                          " on rank ",
                                          std::to_string(group.rank),
                                          ": ",
                                          who,
                                          "; gloo: ",
                                          said});
      std::rethrow_exception(make_exception(DPT_ERR_PEER_LOST, text));
    }
    std::rethrow_exception(with_explanation(group.explain, failure));
  }
}

void DelegatedWork::synchronize() {
  work_->synchronize();
  ended(DPT_OK);
}

c10::intrusive_ptr<c10::ivalue::Future> DelegatedWork::getFuture() {
  auto future = work_->getFuture();
  if (!followed_.exchange(true)) {
    watch_.group->api->record_wait(watch_.recorded);
    future->addCallback([api = watch_.group->api, recorded = watch_.recorded, since = now_ns()](
                            c10::ivalue::Future& done) {
      note_followed(since);
      api->record_end(recorded, done.hasError() ? DPT_ERR_DELEGATE : DPT_OK, 0);
    });
  }
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> DelegatedWork::getFutureResult() {
  return work_->getFutureResult();
}

}  // namespace dpt::c10d_adapter
