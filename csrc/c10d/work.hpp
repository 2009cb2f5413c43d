// c10d::Work for native operations: what the caller waits on, and the future hooks listen to.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "deepytorch.h"

namespace dpt::c10d_adapter {

// The exception torch users know for a failed native operation: ValueError for DPT_ERR_INVALID,
// DistBackendError for the rest. The text ends with the switch that turns deepytorch off.
std::exception_ptr make_exception(dpt_status status, const std::string& message);

// When a wait that begins now is over; c10d's limits may be longer than its clock can count.
constexpr std::chrono::milliseconds kLongestWait = std::chrono::hours(24 * 36500);
inline std::chrono::steady_clock::time_point end_of_wait(std::chrono::milliseconds timeout) {
  return std::chrono::steady_clock::now() + std::min(timeout, kLongestWait);
}

// Says what a hang comes from, given the failure that it ended in; empty where there is nothing to
// say.
using Explain = std::function<std::string(const std::string& failure)>;
// `message`, after what `explain` says of it where it is of a kind that needs explaining.
std::string explained(const Explain& explain, dpt_status status, const std::string& message);

// The same of an exception of the delegate's, which stays what it was where there is nothing to
// say.
std::exception_ptr with_explanation(const Explain& explain, const std::exception_ptr& failure);

class NativeWork : public c10d::Work {
 public:
  struct Options {
    int rank;
    c10d::OpType op_type;
    const char* title;
    std::string profiled_as;  // its name in a profile; empty: it is in none
    uint64_t sequence;
    std::vector<at::Tensor> results;  // what result() and the future give
    Explain explain = nullptr;
    // Runs once at the end of a successful operation, in the thread that completes it. It copies
    // results back into tensors that were not contiguous, and keeps buffers alive until then.
    std::function<void()> finalize = nullptr;
    // After DPT_ERR_DELEGATE: the exception that the delegate left behind.
    std::function<std::exception_ptr()> delegate_failure = nullptr;
    std::shared_ptr<int> source = nullptr;  // of a receive: the sender's rank, known at the end
  };

  // `profiled`: the tensors whose shapes a profile shows.
  NativeWork(Options options, const std::optional<std::vector<at::Tensor>>& profiled);

  // Its number in the flight record, which learns when somebody waits for it. Once it has begun,
  // before anybody else has this work.
  void record_as(const dpt_api* api, uint64_t recorded) {
    api_ = api;
    recorded_ = recorded;
  }

  void complete(dpt_status status, const std::string& message);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void abort() override;
  std::vector<at::Tensor> result() override { return options_.results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  int sourceRank() const override;
  uint64_t getSequencenumber() const override { return options_.sequence; }

 private:
  void settle_future();

  Options options_;
  const dpt_api* api_ = nullptr;
  uint64_t recorded_ = 0;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when first asked for; guarded by mutex_
  int64_t followed_since_ns_ = 0;  // 0: nobody waits through the future alone; guarded by mutex_
};

// Several operations the caller waits for together.
class JoinedWork : public c10d::Work {
 public:
  JoinedWork(int rank,
             c10d::OpType op_type,
             std::vector<c10::intrusive_ptr<c10d::Work>> parts,
             std::vector<at::Tensor> results);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
  std::vector<at::Tensor> results_;
};

// The one work of several operations, or that of the only one.
c10::intrusive_ptr<c10d::Work> join_works(int rank,
                                          c10d::OpType op_type,
                                          std::vector<c10::intrusive_ptr<c10d::Work>> parts,
                                          std::vector<at::Tensor> results);

}  // namespace dpt::c10d_adapter
