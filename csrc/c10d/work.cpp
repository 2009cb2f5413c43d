#include "work.hpp"

#include <ATen/core/List.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <optional>

#include "convert.hpp"
#include "in_collective.hpp"
#include "python_bridge.hpp"

namespace dpt::c10d_adapter {
namespace {

// How long a wait sleeps before it looks for Ctrl-C again.
constexpr std::chrono::milliseconds kSignalSlice{100};

c10::intrusive_ptr<c10::ivalue::Future> make_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

// Whether the stock backend failed because another rank did not do its part, and not because of
// what it was asked for.
bool is_of_waiting(const std::string& message) {
  static constexpr std::array<const char*, 8> kWords = {
      "imed out", "imeout", "onnect", "closed", "pipe", "ocket", "abort", "peer"};
  return std::any_of(kWords.begin(), kWords.end(), [&](const char* word) {
    return message.find(word) != std::string::npos;
  });
}

}  // namespace

std::exception_ptr make_exception(dpt_status status, const std::string& message) {
  const std::string text = message + " (DEEPYTORCH_ENABLED=0 turns deepytorch off)";
  try {
    if (status == DPT_ERR_INVALID) C10_THROW_ERROR(ValueError, text);
    C10_THROW_ERROR(DistBackendError, text);
  } catch (...) {
    return std::current_exception();
  }
}

std::string explained(const Explain& explain, dpt_status status, const std::string& message) {
  // To the rank that did not time out itself it is an abort.
  const bool timed_out = status == DPT_ERR_TIMEOUT ||
                         (status == DPT_ERR_ABORTED && message.find("timed out") != message.npos);
  // A kernel sees that its peer is in another operation, and the flight records in which.
  const bool is_one_sided =
      status == DPT_ERR_MISMATCH && message.find(" on GPUs of group ") != message.npos;
  if (!explain || !(timed_out || is_one_sided)) return message;
  const std::string sentence = explain(message);
  return sentence.empty() ? message : sentence + "\n" + message;
}

std::exception_ptr with_explanation(const Explain& explain, const std::exception_ptr& failure) {
  if (!explain || !failure) return failure;
  try {
    std::rethrow_exception(failure);
  } catch (const c10::ValueError&) {
    return failure;
  } catch (const c10::NotImplementedError&) {
    return failure;
  } catch (const std::exception& caught) {
    const auto* const of_torch = dynamic_cast<const c10::Error*>(&caught);
    const std::string message =
        of_torch != nullptr ? of_torch->what_without_backtrace() : caught.what();
    if (!is_of_waiting(message)) return failure;
    const std::string sentence = explain(message);
    if (sentence.empty()) return failure;
    const std::string text = sentence + "\n" + message;
    if (dynamic_cast<const c10::DistBackendError*>(of_torch) == nullptr) {
      return std::make_exception_ptr(std::runtime_error(text));
    }
    try {
      C10_THROW_ERROR(DistBackendError, text);
    } catch (...) {
      return std::current_exception();
    }
  } catch (...) {
    return failure;
  }
}

NativeWork::NativeWork(Options options, const std::optional<std::vector<at::Tensor>>& profiled)
    : c10d::Work(options.rank,
                 options.op_type,
                 options.profiled_as.empty() ? nullptr : options.profiled_as.c_str(),
                 profiled),
      options_(std::move(options)) {}

void NativeWork::complete(dpt_status status, const std::string& message) {
  std::exception_ptr error;
  if (status == DPT_OK) {
    try {
      if (options_.finalize) options_.finalize();
    } catch (...) {
      error = std::current_exception();
    }
  } else if (status == DPT_ERR_DELEGATE) {
    error = with_explanation(options_.explain, options_.delegate_failure());
  } else {
    error = make_exception(status, explained(options_.explain, status, message));
  }
  if (error) note_failure();
  options_.finalize = nullptr;
  options_.delegate_failure = nullptr;
  finish(error);
  settle_future();
}

void NativeWork::settle_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(mutex_);
    if (!completed_ || !future_ || future_->completed()) return;
    future = future_;
    if (followed_since_ns_ != 0) note_followed(followed_since_ns_);
  }
  // Outside the lock: callbacks run here and may wait on this work.
  if (exception_) {
    future->setErrorIfNeeded(exception_);
  } else {
    future->markCompleted(at::IValue(options_.results));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> NativeWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool completed;
  {
    std::lock_guard lock(mutex_);
    completed = completed_;
    if (!future_) {
      if (!completed) followed_since_ns_ = now_ns();
      future_ = make_future();
      // The completing thread settles it, unless it has come and gone already.
      if (completed) {
        if (exception_) {
          future_->setErrorIfNeeded(exception_);
        } else {
          future_->markCompleted(at::IValue(options_.results));
        }
      }
    }
    future = future_;
  }
  return future;
}

bool NativeWork::wait(std::chrono::milliseconds timeout) {
  const auto end = end_of_wait(timeout);
  std::unique_lock lock(mutex_);
  std::optional<InCollective> counted;
  if (!completed_) {
    counted.emplace();
    followed_since_ns_ = 0;
    if (api_ != nullptr) api_->record_wait(recorded_);
  }
  while (!completed_) {
    auto slice = kSignalSlice;
    if (timeout != kNoTimeout) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          end - std::chrono::steady_clock::now());
      if (left.count() <= 0) {
        std::rethrow_exception(make_exception(
            DPT_ERR_TIMEOUT,
            std::string("deepytorch: ") + options_.title + " #" +
                std::to_string(options_.sequence) + ": wait() gave up after " +
                std::to_string(timeout.count()) + " ms; the operation is still under way"));
      }
      slice = std::min(slice, left);
    }
    if (cv_.wait_for(lock, slice, [&] { return completed_; })) break;
    lock.unlock();
    if (const std::exception_ptr raised = run_signal_handlers()) std::rethrow_exception(raised);
    lock.lock();
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void NativeWork::synchronize() { wait(); }

int NativeWork::sourceRank() const {
  return options_.source ? *options_.source : c10d::Work::sourceRank();
}

void NativeWork::abort() {
  TORCH_CHECK(false, "deepytorch: one operation cannot be aborted; abort its process group");
}

JoinedWork::JoinedWork(int rank,
                       c10d::OpType op_type,
                       std::vector<c10::intrusive_ptr<c10d::Work>> parts,
                       std::vector<at::Tensor> results)
    : c10d::Work(rank, op_type), parts_(std::move(parts)), results_(std::move(results)) {}

bool JoinedWork::isCompleted() {
  for (const auto& part : parts_) {
    if (!part->isCompleted()) return false;
  }
  return true;
}

bool JoinedWork::isSuccess() const { return exception() == nullptr; }

std::exception_ptr JoinedWork::exception() const {
  for (const auto& part : parts_) {
    if (auto error = part->exception()) return error;
  }
  return nullptr;
}

bool JoinedWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& part : parts_) part->wait(timeout);
  return true;
}

void JoinedWork::synchronize() {
  for (const auto& part : parts_) part->synchronize();
}

c10::intrusive_ptr<c10::ivalue::Future> JoinedWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& part : parts_) futures.push_back(part->getFuture());
  return c10::collectAll(futures)->then(
      [results = results_](c10::ivalue::Future& all) {
        all.wait();
        return at::IValue(results);
      },
      c10::ListType::create(c10::TensorType::get()));
}

c10::intrusive_ptr<c10d::Work> join_works(int rank,
                                          c10d::OpType op_type,
                                          std::vector<c10::intrusive_ptr<c10d::Work>> parts,
                                          std::vector<at::Tensor> results) {
  if (parts.size() == 1) return parts[0];
  return c10::make_intrusive<JoinedWork>(rank, op_type, std::move(parts), std::move(results));
}

}  // namespace dpt::c10d_adapter
