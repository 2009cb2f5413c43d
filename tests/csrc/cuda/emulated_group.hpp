// Ranks of a device group that are host threads, what they work on, and what is to come of it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "cuda/vectors.cuh"

namespace dpt::cuda {

// A group of ranks that are host threads; small staging, so that little data takes many rounds.
class EmulatedGroup {
 public:
  static constexpr Grid kGrid{2, 64};
  static constexpr uint32_t kSlotBytes = 128;
  static constexpr uint32_t kLineBytes = 1024;
  static constexpr uint32_t kPacketBytes = 1024;
  static constexpr size_t kPoolBytes = 64 << 10;
  static constexpr Layout kPair{2, kGrid.channels, kSlotBytes, kLineBytes, kPacketBytes};
  static constexpr uint64_t kMostInLines = most_in_lines(kPair, kGrid);
  static constexpr uint64_t kMostInPackets = most_in_packets(kPair, kGrid);

  explicit EmulatedGroup(int size) : size_(size) {
    const Layout layout{size, kGrid.channels, kSlotBytes, kLineBytes, kPacketBytes};
    for (int rank = 0; rank < size; ++rank) {
      blocks_.emplace_back(layout.block_bytes() + kAlignment);
      statuses_.push_back(std::make_unique<HostStatus>());
      *statuses_.back() = {};
      statuses_.back()->released = 1;
      pools_.emplace_back(kPoolBytes + kAlignment);
    }
    for (int rank = 0; rank < size; ++rank) {
      GroupView view{layout, rank, {}, {}, 0, statuses_[rank].get()};
      for (int peer = 0; peer < size; ++peer) {
        view.blocks[peer] = aligned(blocks_[peer].data());
        view.pools[peer] = pool(peer);
      }
      mask(&view, ~0u);
      views_.push_back(view);
    }
  }

  // Takes all but its neighbours from each rank: touching other memory then crashes. [rank]: bits.
  void leave_neighbours(const std::vector<uint32_t>& neighbours) {
    for (int rank = 0; rank < size_; ++rank) mask(&views_[rank], neighbours[rank]);
  }

  // Every rank's host thread; `body` starts kernels with the launch it is given.
  void run(const std::function<void(int rank, const Launch& launch)>& body,
           Grid grid = kGrid,
           std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size_; ++rank) {
      ranks.emplace_back([&, rank] {
        const uint64_t timeout_ns =
            static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count());
        body(rank, {views_[rank], {timeout_ns, 7}, grid, nullptr, kSlotBytes});
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }

  // A rank's registered memory, aligned.
  char* pool(int rank) { return aligned(pools_[rank].data()); }
  // Counts the queues to that rank that have ever had a chunk in its output.
  int num_landed(int rank) {
    const auto& control = *reinterpret_cast<const Control*>(aligned(blocks_[rank].data()));
    int landed = 0;
    for (const auto& channel : control.landed_from) {
      for (const auto& lane : channel) {
        for (const uint32_t from : lane) landed += from != 0 && from != ~0u ? 1 : 0;
      }
    }
    return landed;
  }

  const HostStatus& status(int rank) const { return *statuses_[rank]; }
  void abort(int rank) { store_relaxed(&statuses_[rank]->abort, 1); }
  void hold(int rank) { store_relaxed(&statuses_[rank]->released, 0); }
  void release(int rank) { store_relaxed(&statuses_[rank]->released, 1); }
  void expect_healthy() const {
    for (const auto& status : statuses_) {
      EXPECT_EQ(status->abort, 0u);
      EXPECT_EQ(status->code, HostStatus::kNone);
    }
  }

 private:
  static char* aligned(char* address) {
    const auto value = reinterpret_cast<uintptr_t>(address);
    return reinterpret_cast<char*>((value + kAlignment - 1) / kAlignment * kAlignment);
  }
  static void mask(GroupView* view, uint32_t reached) {
    view->neighbours = 0;
    for (int peer = 0; peer < view->layout.size; ++peer) {
      if (peer == view->rank) continue;
      if ((reached >> peer & 1) != 0) {
        view->neighbours |= 1u << peer;
      } else {
        view->blocks[peer] = view->pools[peer] = nullptr;
      }
    }
  }

  int size_;
  std::vector<std::vector<char>> blocks_;
  std::vector<std::vector<char>> pools_;
  std::vector<std::unique_ptr<HostStatus>> statuses_;
  std::vector<GroupView> views_;
};

// `count` elements that start `shift` elements behind an aligned address.
template <typename T>
class Shifted {
 public:
  Shifted(size_t count, size_t shift)
      : count_(count), memory_(count + shift + kAlignment / sizeof(T)) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    first_ = memory_.data() + (kAlignment - address % kAlignment) % kAlignment / sizeof(T) + shift;
  }
  Shifted(Shifted&&) = default;
  T* data() { return first_; }
  const T* data() const { return first_; }
  char* bytes() { return reinterpret_cast<char*>(first_); }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return first_[i]; }

 private:
  size_t count_;
  std::vector<T> memory_;
  T* first_;
};

template <typename T>
constexpr DataType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DPT_FLOAT32;
  if constexpr (std::is_same_v<T, double>) return DPT_FLOAT64;
  if constexpr (std::is_same_v<T, __half>) return DPT_FLOAT16;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return DPT_BFLOAT16;
  if constexpr (std::is_same_v<T, int32_t>) return DPT_INT32;
  if constexpr (std::is_same_v<T, int64_t>) return DPT_INT64;
}

template <typename T>
double as_double(T value) {
  return static_cast<double>(widen<T>(value));
}

// Largest relative error of one rounding to T, and of a sum in its accumulator.
template <typename T>
double tolerance() {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return 1.0 / 256;
  if constexpr (std::is_same_v<T, __half>) return 1.0 / 2048;
  if constexpr (std::is_same_v<T, float>) return 1e-6;
  if constexpr (std::is_same_v<T, double>) return 1e-14;
  return 0;
}

template <typename T>
std::vector<Shifted<T>> random_inputs(int ranks, size_t count, size_t shift, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> values(-100, 100);
  std::vector<Shifted<T>> inputs;
  for (int rank = 0; rank < ranks; ++rank) {
    inputs.emplace_back(count, shift);
    for (size_t i = 0; i < count; ++i) {
      using Accumulator = typename AccumulatorOf<T>::type;
      inputs.back()[i] = narrow<T>(static_cast<Accumulator>(values(random)));
    }
  }
  return inputs;
}

template <typename T>
double expected_of(std::vector<Shifted<T>>& inputs, size_t i, ReduceOp op) {
  double sum = as_double<T>(inputs[0][i]);
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    const double value = as_double<T>(inputs[rank][i]);
    if (op == DPT_MIN) {
      sum = std::min(sum, value);
    } else if (op == DPT_MAX) {
      sum = std::max(sum, value);
    } else {
      sum += value;
    }
  }
  return op == DPT_AVG ? sum / static_cast<double>(inputs.size()) : sum;
}

}  // namespace dpt::cuda
