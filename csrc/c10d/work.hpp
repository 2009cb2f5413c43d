// c10d::Work for native operations: what the caller waits on, and the future hooks listen to.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "deepytorch.h"

namespace dpt::c10d_adapter {

// The exception torch users know for a failed native operation: ValueError for DPT_ERR_INVALID,
// DistBackendError for the rest. The text ends with the switch that turns deepytorch off.
std::exception_ptr make_exception(dpt_status status, const std::string& message);

class NativeWork : public c10d::Work {
 public:
  struct Options {
    int rank;
    c10d::OpType op_type;
    const char* title;  // in profiles, e.g. "deepytorch:all_reduce"
    uint64_t sequence;
    std::vector<at::Tensor> results;  // what result() and the future give
    // Runs once at the end of a successful operation, in the thread that completes it: copies
    // results back into tensors that were not contiguous, and keeps buffers alive until then.
    std::function<void()> finalize;
    // After DPT_ERR_DELEGATE: the exception that the delegate left behind.
    std::function<std::exception_ptr()> delegate_failure;
    std::shared_ptr<int> source;  // of a receive: the sender's rank, known at the end
  };

  explicit NativeWork(Options options);

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
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when first asked for; guarded by mutex_
};

// An operation of the stock backend on host memory, whose own errors say which socket broke; these
// say which rank died, where that can be known.
class DelegatedWork : public c10d::Work {
 public:
  // `who_died` gives "rank 1 (pid 4711) died", or nothing; asked only after a failure.
  DelegatedWork(c10::intrusive_ptr<c10d::Work> work,
                std::string title,
                std::function<std::string()> who_died);

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { work_->synchronize(); }
  void abort() override { work_->abort(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }
  int sourceRank() const override { return work_->sourceRank(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::string title_;
  std::function<std::string()> who_died_;
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

}  // namespace dpt::c10d_adapter
