#include "native_group.hpp"

#include <chrono>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "convert.hpp"
#include "in_collective.hpp"
#include "python_bridge.hpp"
#include "store.hpp"

namespace dpt::c10d_adapter {
namespace {

// Ctrl-C raised this inside a wait of the core; picked up when that wait has returned.
thread_local std::exception_ptr pending_signal;

// How long rank 0 stays for ranks that are still making the group; they are at it together.
constexpr std::chrono::seconds kMakingLimit{5};
constexpr const char* kMadeKey = "deepytorch/made/";

void on_done(void* context, dpt_status status, const char* message) {
  const auto work = c10::intrusive_ptr<NativeWork>::reclaim(static_cast<NativeWork*>(context));
  work->complete(status, message);
}

}  // namespace

void NativeGroup::make() {
  std::vector<int64_t> global_ranks;
  for (const uint64_t rank : setup_.options->global_ranks_in_group) {
    global_ranks.push_back(static_cast<int64_t>(rank));
  }
  if (global_ranks.empty()) {
    for (int rank = 0; rank < setup_.size; ++rank) global_ranks.push_back(rank);
  }
  DPT_CHECK_VALUE(global_ranks.size() == static_cast<size_t>(setup_.size),
                  {std::to_string(global_ranks.size()),
                   " global ranks for a group of ",
                   std::to_string(setup_.size)});
  const dpt_comm_options options{setup_.options->group_name.c_str(),
                                 setup_.rank,
                                 setup_.size,
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
  dpt_error error{};
  const dpt_status status = setup_.api->comm_create(&options, &store, &delegate_, &comm_, &error);
  if (status != DPT_OK) std::rethrow_exception(make_exception(status, error.message));
  if (setup_.rank != 0) {
    setup_.store->set(kMadeKey + std::to_string(setup_.rank), std::vector<uint8_t>{1});
  }
}

void NativeGroup::end() {
  let_others_make_it();
  without_gil([&] { destroy(); });
}

void NativeGroup::destroy() {
  if (dpt_comm* const comm = std::exchange(comm_, nullptr)) setup_.api->comm_destroy(comm);
}

void NativeGroup::abort(const char* reason) {
  if (comm_ != nullptr) setup_.api->comm_abort(comm_, reason);
}

void NativeGroup::check_open(const char* title) const {
  if (comm_ != nullptr) return;
  std::rethrow_exception(make_exception(DPT_ERR_ABORTED,
                                        join_text({"deepytorch: ",
                                                   title,
                                                   ": process group ",
                                                   setup_.options->group_name,
                                                   " was destroyed"})));
}

uint64_t NativeGroup::count(bool is_message) {
  const uint64_t sequence = ++sequence_;
  if (is_message) ++messages_;
  return sequence;
}

void NativeGroup::submit(const dpt_request& request,
                         const std::exception_ptr& delegates,
                         c10::intrusive_ptr<NativeWork> work,
                         dpt_outcome* outcome) const {
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
  if (status != DPT_OK) throw_failure(status, delegates, error);
}

[[gnu::cold, gnu::noinline]] void NativeGroup::throw_failure(dpt_status status,
                                                             const std::exception_ptr& delegates,
                                                             const dpt_error& error) const {
  note_failure();
  if (status == DPT_ERR_DELEGATE) std::rethrow_exception(delegates);
  std::rethrow_exception(
      make_exception(status, explained(setup_.hooks.explain, status, error.message)));
}

void NativeGroup::let_others_make_it() const {
  static std::atomic<bool> somebody_is_lost{false};  // and won't come for other groups either
  if (setup_.rank != 0 || sequence_ > 0 || comm_ == nullptr || made_in_ != ::getpid()) return;
  if (somebody_is_lost) return;
  std::vector<std::string> made;
  for (int rank = 1; rank < setup_.size; ++rank) made.push_back(kMadeKey + std::to_string(rank));
  without_gil([&] { somebody_is_lost = !wait_for_keys(*setup_.store, made, kMakingLimit); });
}

int NativeGroup::poll_signals(void*) {
  pending_signal = run_signal_handlers();
  return pending_signal != nullptr;
}

void NativeGroup::explain_failure(void* context,
                                  const char* failure,
                                  char* sentence,
                                  size_t bytes) {
  std::snprintf(sentence,
                bytes,
                "%s",
                static_cast<NativeGroup*>(context)->setup_.hooks.explain(failure).c_str());
}

}  // namespace dpt::c10d_adapter
