// Programs on GPUs without peer access, from the C ABI down to the copy engine, which is a fake
// (fake_device.hpp).
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "comm/decisions.hpp"
#include "comm/end_process.hpp"
#include "comm/statistics.hpp"
#include "fake_copy_engine.hpp"
#include "fake_device.hpp"
#include "rank_threads.hpp"

namespace dpt::testing {

class CpuReduce : public ::testing::Test {
 protected:
  CpuReduce() {
    Decisions::instance().reset();
    reset_statistics();
    fake_devices() = {};
    fake_devices().why_absent = "";
    fake_devices().peer_access = false;
    fake_devices().time_us = [](const DevicePlan&, size_t) { return 10.0; };
    replace_end_process([this](const std::string&) { ++ends_; });
  }
  ~CpuReduce() override {
    replace_end_process(nullptr);
    Decisions::instance().reset();
    fake_devices() = {};
  }

  static std::function<dpt_status(const dpt_request&)> stock(double time_us) {
    return [time_us](const dpt_request&) {
      advance_device(time_us);
      return DPT_OK;
    };
  }

  static std::string reason_of(AlgorithmName algorithm) {
    for (const StatisticsRow& row : all_statistics()) {
      if (row.algorithm == algorithm) return row.reason;
    }
    return "none";
  }

  std::atomic<int> ends_ = 0;
};

// A rank's program: one stream.
class Program {
 public:
  explicit Program(Rank& rank, bool busy = false)
      : rank_(rank), busy_(busy), lane_(rank.rank(), 0) {}

  FakeLane& lane() { return lane_; }

  dpt_outcome run(Request& request) {
    request.request.on_device = 1;
    request.request.device = rank_.rank();
    request.request.stream = [](void* call) -> void* { return current(call); };
    if (busy_) request.request.busy = [](void*) { return 1; };
    current(nullptr) = &lane_;
    return rank_.run(request);
  }

  dpt_outcome sum_ones(size_t bytes, int64_t timeout_ms = 20000) {
    values_.assign(bytes / sizeof(float), 1.0F);
    Request request(DPT_ALL_REDUCE, DPT_FLOAT32, values_.size());
    request.reduce_op(DPT_SUM).timeout_ms(timeout_ms).input(values_.data()).output(values_.data());
    return run(request);
  }
  void check_sum() {
    lane_.synchronize();
    const auto ranks = static_cast<float>(rank_.size());
    EXPECT_EQ(values_, std::vector<float>(values_.size(), ranks));
  }

  // Gathers every rank's number and reduces what was gathered: rank r gets r of each.
  void gather_and_scatter(ReduceOp op) {
    constexpr size_t kCount = 50001;
    const int size = rank_.size();
    const auto own = static_cast<float>(rank_.rank());
    const std::vector<float> mine(kCount, own);
    std::vector<float> all(size * kCount);
    Request gather(DPT_ALL_GATHER, DPT_FLOAT32, kCount);
    gather.input(mine.data());
    for (int from = 0; from < size; ++from) gather.output(all.data() + from * kCount);
    EXPECT_EQ(run(gather), DPT_COMPLETED);
    std::vector<float> part(kCount);
    Request scatter(DPT_REDUCE_SCATTER, DPT_FLOAT32, kCount);
    scatter.reduce_op(op).output(part.data());
    for (int to = 0; to < size; ++to) scatter.input(all.data() + to * kCount);
    EXPECT_EQ(run(scatter), DPT_COMPLETED);
    lane_.synchronize();
    for (int from = 0; from < size; ++from) {
      EXPECT_EQ(all[from * kCount], static_cast<float>(from));
      EXPECT_EQ(all[(from + 1) * kCount - 1], static_cast<float>(from));
    }
    const float reduced = op == DPT_MAX ? own : static_cast<float>(size) * own;
    EXPECT_EQ(part, std::vector<float>(kCount, reduced));
  }

  dpt_outcome broadcast_from_2() {
    values_.assign(50001, static_cast<float>(rank_.rank()));
    Request broadcast(DPT_BROADCAST, DPT_FLOAT32, values_.size());
    broadcast.root(2).input(values_.data()).output(values_.data());
    const dpt_outcome outcome = run(broadcast);
    lane_.synchronize();
    return outcome;
  }
  const std::vector<float>& values() const { return values_; }

 private:
  static FakeLane*& current(void*) {
    thread_local FakeLane* lane = nullptr;
    return lane;
  }

  Rank& rank_;
  bool busy_;
  FakeLane lane_;
  std::vector<float> values_;
};

}  // namespace dpt::testing
