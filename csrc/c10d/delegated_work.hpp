// The stock backend's work on host memory, as its caller gets it. The flight record learns of the
// work's end, and a failure says first what it comes from.
#pragma once

#include <atomic>

#include "work.hpp"

namespace dpt::c10d_adapter {

class DelegatedWork : public c10d::Work {
 public:
  // All operations of a group have this in common.
  struct Group {
    int rank;
    const dpt_api* api;
    Explain explain;
    std::string name;
    std::function<std::string()> who_died;  // "rank 1 (pid 4711) died", or nothing
  };
  struct Watch {
    std::shared_ptr<const Group> group;
    c10d::OpType op_type;
    const char* title;
    uint64_t recorded;  // its number in the flight record
  };

  DelegatedWork(c10::intrusive_ptr<c10d::Work> work, Watch watch);
  ~DelegatedWork() override;

  bool isCompleted() override;
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  void blockCurrentStream() override { work_->blockCurrentStream(); }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  void ended(dpt_status status) const { watch_.group->api->record_end(watch_.recorded, status, 0); }

  c10::intrusive_ptr<c10d::Work> work_;
  Watch watch_;
  std::atomic<bool> followed_{false};
};

}  // namespace dpt::c10d_adapter
