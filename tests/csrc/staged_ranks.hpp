// Staged groups on boards of their own: threads play the devices (fake_copy_engine.hpp), and
// sockets connect the nodes. Operations on them are here too, with the results that they must give.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "elements.hpp"
#include "fake_copy_engine.hpp"
#include "staged/internode/internode_sender.hpp"
#include "staged/pipeline.hpp"
#include "staged/workers.hpp"

namespace dpt::testing {

inline constexpr size_t kStagedSlot = 2 * staged::Board::kPage;

// A process: its workers, which serve all its groups, and the program's stream.
struct Process {
  explicit Process(int rank, int threads = 2)
      : workers(threads, {}, std::chrono::microseconds{0}), stream(rank, 0) {}
  staged::Workers workers;
  FakeLane stream;
  std::unique_ptr<FakeQueues> queues;
};

struct StagedOptions {
  int depth = 3;
  int threads = 2;
  uint64_t first_chunk = 1;
  int delay_us = 20;
  int slow_rank = -1;
  bool one_queue = false;
  bool on_devices = false;
  std::vector<int> node_of = {};  // of each rank; empty: one node
  std::function<void()> before_copy_of_rank_0 = {};
  std::vector<std::span<const char>> allocations = {};  // as FakeCopyEngine has them
};

// The ends of connections between partners, which are all connected.
class FakeLinks {
 public:
  explicit FakeLinks(const NodeLayout& layout);
  // Hands out the links of rank `rank`.
  std::shared_ptr<staged::Between> take(int rank) { return std::move(of_rank_[rank]); }
  // Any trouble that a rank was told of.
  std::string trouble();

 private:
  Connection::Host host();

  std::mutex mutex_;
  std::string trouble_;
  std::vector<std::shared_ptr<staged::Between>> of_rank_;
};

// One group: a board for each node and what every rank has of it.
class StagedRanks {
 public:
  StagedRanks(std::vector<std::unique_ptr<Process>>& processes,
              const StagedOptions& options = StagedOptions());
  ~StagedRanks();

  int size() const { return static_cast<int>(processes_.size()); }
  staged::Pipeline& operator[](int rank) { return *pipelines_[rank]; }
  FakeLinks& links() { return *links_; }
  // Its process destroys the group.
  void leave(int rank) {
    processes_[rank]->workers.remove(pipelines_[rank].get());
    pipelines_[rank].reset();
  }

  std::vector<staged::Job> job(int rank, const dpt_request& request, const staged::Cut& cut) const {
    return staged::Job::of(request, cut, {layout_, rank}, shape_);
  }
  void enqueue(int rank,
               const dpt_request& request,
               const staged::Cut& cut,
               std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    (*this)[rank].enqueue(job(rank, request, cut), timeout, &processes_[rank]->stream);
  }

 private:
  struct Free {
    void operator()(char* memory) const {
      ::operator delete[](memory, std::align_val_t{staged::Board::kPage});
    }
  };
  std::vector<std::unique_ptr<Process>>& processes_;
  NodeLayout layout_;
  staged::Shape shape_;
  std::vector<std::unique_ptr<char, Free>> memory_;  // of each node
  std::vector<std::vector<char>> devices_;
  std::vector<char*> slots_;
  std::unique_ptr<FakeLinks> links_;
  std::vector<std::unique_ptr<FakeCopyEngine>> engines_;
  std::vector<std::unique_ptr<staged::Pipeline>> pipelines_;
};

inline std::vector<std::unique_ptr<Process>> processes(int size, int threads = 2) {
  std::vector<std::unique_ptr<Process>> all;
  for (int rank = 0; rank < size; ++rank) all.push_back(std::make_unique<Process>(rank, threads));
  return all;
}

// One operation's buffers on every rank, and what they must hold in the end.
class Operation {
 public:
  Operation(
      Collective collective, DataType dtype, ReduceOp op, size_t count, int size, int salt = 0)
      : collective_(collective), op_(op), size_(size), root_(salt % size) {
    const bool parts = collective == DPT_REDUCE_SCATTER;
    const bool gathers = collective == DPT_ALL_GATHER;
    for (int rank = 0; rank < size; ++rank) {
      factors_.push_back(rank + 1);
      for (int part = 0; part < (parts ? size : 1); ++part) {
        inputs_[rank].emplace_back(dtype, count).fill(rank, salt + part);
      }
      for (int part = 0; part < (gathers ? size : 1); ++part)
        outputs_[rank].emplace_back(dtype, count);
    }
    inputs_.resize(size);
  }

  dpt_request request(int rank) {
    dpt_request request{};
    request.collective = collective_;
    request.dtype = inputs_[rank][0].dtype();
    request.reduce_op = op_;
    request.premul_factor = factors_[rank];
    request.root = root_;
    request.count = inputs_[rank][0].count();
    pointers_[rank].clear();
    for (Elements& input : inputs_[rank]) pointers_[rank].push_back(input.data());
    results_[rank].clear();
    for (Elements& output : outputs_[rank]) results_[rank].push_back(output.data());
    request.inputs = pointers_[rank].data();
    request.outputs = results_[rank].data();
    return request;
  }
  // The output is the input's memory.
  dpt_request in_place(int rank) {
    dpt_request result = request(rank);
    const size_t own = collective_ == DPT_REDUCE_SCATTER ? rank : 0;
    outputs_[rank][0] = inputs_[rank][own];
    pointers_[rank][own] = outputs_[rank][0].data();
    return result;
  }

  // Nothing was written there.
  bool is_untouched(int rank) const {
    const Elements nothing(outputs_[rank][0].dtype(), outputs_[rank][0].count());
    return std::all_of(outputs_[rank].begin(), outputs_[rank].end(), [&](const Elements& each) {
      return each == nothing;
    });
  }

  void check(int rank) const {
    for (size_t part = 0; part < outputs_[rank].size(); ++part) {
      EXPECT_EQ(outputs_[rank][part], expected(rank, part))
          << name_of(collective_) << " " << name_of(op_) << " of " << inputs_[rank][0].count()
          << " x " << name_of(inputs_[rank][0].dtype()) << " on rank " << rank << " of " << size_;
    }
  }

 private:
  Elements expected(int rank, size_t part) const {
    if (collective_ == DPT_ALL_GATHER) return inputs_[part][0];
    if (collective_ == DPT_BROADCAST) return inputs_[root_][0];
    std::vector<Elements> all;
    const int own = collective_ == DPT_REDUCE_SCATTER ? rank : 0;
    for (int from = 0; from < size_; ++from) all.push_back(inputs_[from][own]);
    return reference_reduce(op_, all, op_ == DPT_PREMUL_SUM ? factors_ : std::vector<double>{});
  }

  Collective collective_;
  ReduceOp op_;
  int size_;
  int root_;
  std::vector<double> factors_;
  static constexpr size_t kMost = 8;
  std::vector<std::vector<Elements>> inputs_{kMost};
  std::vector<std::vector<Elements>> outputs_{kMost};
  std::vector<std::vector<const void*>> pointers_{kMost};
  std::vector<std::vector<void*>> results_{kMost};
};

inline void run(StagedRanks& ranks,
                std::vector<std::unique_ptr<Process>>& all,
                Operation& operation,
                const staged::Cut& cut) {
  for (int rank = 0; rank < ranks.size(); ++rank) {
    ranks.enqueue(rank, operation.request(rank), cut);
  }
  for (int rank = 0; rank < ranks.size(); ++rank) {
    all[rank]->stream.synchronize();
    operation.check(rank);
  }
}

inline bool is_reduction(Collective collective) {
  return collective == DPT_ALL_REDUCE || collective == DPT_REDUCE_SCATTER;
}

}  // namespace dpt::testing
