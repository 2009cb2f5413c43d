// Collectives that move or reduce parts, with buffers in plain and in registered memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "comm/c_api.hpp"
#include "elements.hpp"
#include "rank_threads.hpp"

namespace dpt::testing {
namespace {

using ::testing::HasSubstr;

// A buffer in plain or registered memory between guard bytes.
class Buffer {
 public:
  Buffer(size_t bytes, bool registered) : bytes_(bytes), registered_(registered) {
    if (registered) {
      dpt_error error{};
      void* memory = nullptr;
      if (api()->memory_allocate(bytes + 2 * kGuard, &memory, &error) != DPT_OK) {
        throw std::runtime_error(error.message);
      }
      memory_ = static_cast<unsigned char*>(memory);
    } else {
      memory_ = new unsigned char[bytes + 2 * kGuard];
    }
    std::memset(memory_, kGuardByte, bytes + 2 * kGuard);
  }
  explicit Buffer(const Elements& from, bool registered = false)
      : Buffer(from.count() * size_of(from.dtype()), registered) {
    std::memcpy(data(), from.data(), bytes_);
  }
  Buffer(Buffer&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)),
        bytes_(other.bytes_),
        registered_(other.registered_) {}
  ~Buffer() {
    if (registered_ && memory_ != nullptr) {
      api()->memory_free(memory_);
    } else {
      delete[] memory_;
    }
  }
  unsigned char* data() const { return memory_ + kGuard; }
  bool holds(const Elements& expected) const {
    return bytes_ == expected.count() * size_of(expected.dtype()) && guards_are_whole() &&
           (bytes_ == 0 || std::memcmp(data(), expected.data(), bytes_) == 0);
  }
  bool guards_are_whole() const {
    for (size_t i = 0; i < kGuard; ++i) {
      if (memory_[i] != kGuardByte || memory_[kGuard + bytes_ + i] != kGuardByte) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 24;  // data begins off any vector's alignment
  static constexpr unsigned char kGuardByte = 0xA5;
  unsigned char* memory_;
  size_t bytes_;
  bool registered_;
};

Elements part(DataType dtype, size_t count, int from, int to = 0) {
  Elements elements(dtype, count);
  elements.fill(from, to);
  return elements;
}

// Sets of ranks whose buffers are registered: bit r for rank r.
constexpr int kMixes[] = {0, 0b1, 0b10, 0b10110, ~0};
bool in_mix(int mix, int rank) { return (mix >> rank & 1) != 0; }

const std::vector<size_t> kUnevenCounts = {0, 1, 1023, 50021};

class Parts : public ::testing::TestWithParam<int> {};

TEST_P(Parts, ReducesToEveryRankInEveryMixOfMemory) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const int mix : kMixes) {
      for (const DataType dtype : {DPT_FLOAT32, DPT_BFLOAT16, DPT_INT64}) {
        for (const size_t count : kUnevenCounts) {
          std::vector<Elements> inputs;
          for (int peer = 0; peer < rank.size(); ++peer) inputs.push_back(part(dtype, count, peer));
          const Elements expected = reference_reduce(DPT_SUM, inputs);
          const bool registered = in_mix(mix, rank.rank());
          const Buffer in_place(inputs[rank.rank()], registered);
          rank.run(Request(DPT_ALL_REDUCE, dtype, count)
                       .reduce_op(DPT_SUM)
                       .input(in_place.data())
                       .output(in_place.data()));
          ASSERT_TRUE(in_place.holds(expected)) << mix << " " << count;
          // Input and output of different kinds.
          const Buffer input(inputs[rank.rank()], !registered);
          const Buffer output(inputs[0], registered);
          rank.run(Request(DPT_ALL_REDUCE, dtype, count)
                       .reduce_op(DPT_SUM)
                       .input(input.data())
                       .output(output.data()));
          ASSERT_TRUE(output.holds(expected)) << mix << " " << count;
          ASSERT_TRUE(input.holds(inputs[rank.rank()])) << mix << " " << count;
        }
      }
    }
  });
}

TEST_P(Parts, ReducesToTheRootAlone) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const int mix : kMixes) {
      for (int root = 0; root < rank.size(); ++root) {
        for (const size_t count : kUnevenCounts) {
          std::vector<Elements> inputs;
          for (int peer = 0; peer < rank.size(); ++peer) {
            inputs.push_back(part(DPT_FLOAT32, count, peer));
          }
          const Elements before = part(DPT_FLOAT32, count, 7, 7);
          const Buffer input(inputs[rank.rank()], in_mix(mix, rank.rank()));
          const Buffer output(before, in_mix(mix, rank.rank()));
          rank.run(Request(DPT_REDUCE, DPT_FLOAT32, count)
                       .reduce_op(DPT_SUM)
                       .root(root)
                       .input(input.data())
                       .output(output.data()));
          ASSERT_TRUE(
              output.holds(rank.rank() == root ? reference_reduce(DPT_SUM, inputs) : before))
              << "root " << root << ", mix " << mix << ", " << count;
        }
      }
    }
  });
}

TEST_P(Parts, ReducesAndScattersInEveryMixOfMemory) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const int mix : kMixes) {
      for (const size_t count : kUnevenCounts) {
        std::vector<Elements> for_me;
        for (int peer = 0; peer < rank.size(); ++peer) {
          for_me.push_back(part(DPT_FLOAT32, count, peer, rank.rank()));
        }
        std::vector<Buffer> inputs;
        Request request(DPT_REDUCE_SCATTER, DPT_FLOAT32, count);
        for (int peer = 0; peer < rank.size(); ++peer) {
          // Even the parts of one rank may lie in different places.
          const bool registered = in_mix(mix, rank.rank()) && (mix == ~0 || peer % 2 == 0);
          inputs.emplace_back(part(DPT_FLOAT32, count, rank.rank(), peer), registered);
          request.input(inputs.back().data());
        }
        const Buffer output(for_me[0]);
        rank.run(request.reduce_op(DPT_SUM).output(output.data()));
        ASSERT_TRUE(output.holds(reference_reduce(DPT_SUM, for_me))) << mix << " " << count;
      }
    }
  });
}

// Runs one collective of parts: `parts(from, to)` is what `from` sends to `to`.
void run_parts(Rank& rank,
               Request request,
               const std::vector<Elements>& sent,
               const std::vector<Elements>& expected,
               int mix) {
  std::vector<Buffer> inputs;
  std::vector<Buffer> outputs;
  for (const Elements& elements : sent) {
    inputs.emplace_back(elements, in_mix(mix, rank.rank()));
    request.input(inputs.back().data());
  }
  for (const Elements& elements : expected) {
    outputs.emplace_back(elements.count() * size_of(elements.dtype()), in_mix(mix, rank.rank()));
    request.output(outputs.back().data());
  }
  rank.run(request);
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(outputs[i].holds(expected[i])) << "output " << i << ", mix " << mix;
  }
  for (size_t i = 0; i < sent.size(); ++i) ASSERT_TRUE(inputs[i].holds(sent[i])) << "input " << i;
}

TEST_P(Parts, MovesFromAndToARoot) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const int mix : kMixes) {
      for (int root = 0; root < rank.size(); ++root) {
        const bool is_root = rank.rank() == root;
        for (const size_t count : kUnevenCounts) {
          std::vector<Elements> of_ranks;
          for (int peer = 0; peer < rank.size(); ++peer) {
            of_ranks.push_back(part(DPT_INT32, count, peer));
          }
          const std::vector<Elements> mine = {of_ranks[rank.rank()]};
          const std::vector<Elements> none;
          run_parts(rank,
                    Request(DPT_GATHER, DPT_INT32, count).root(root),
                    mine,
                    is_root ? of_ranks : none,
                    mix);
          run_parts(rank,
                    Request(DPT_SCATTER, DPT_INT32, count).root(root),
                    is_root ? of_ranks : none,
                    mine,
                    mix);
          run_parts(rank,
                    Request(DPT_BROADCAST, DPT_INT32, count).root(root),
                    mine,
                    {of_ranks[root]},
                    mix);
        }
      }
    }
  });
}

TEST_P(Parts, MovesUnevenParts) {
  run_ranks(GetParam(), [](Rank& rank) {
    std::minstd_rand random(42);  // the same on every rank
    for (int round = 0; round < 40; ++round) {
      const int mix = kMixes[round % 5];
      std::vector<size_t> counts(rank.size() * rank.size());
      for (size_t& count : counts) count = random() % 4 == 0 ? 0 : random() % 30000;
      auto count_of = [&](int from, int to) { return counts[from * rank.size() + to]; };

      std::vector<Elements> sent;
      std::vector<Elements> expected;
      std::vector<Elements> gathered;
      std::vector<size_t> sent_counts;
      std::vector<size_t> expected_counts;
      std::vector<size_t> gathered_counts;
      for (int peer = 0; peer < rank.size(); ++peer) {
        sent.push_back(part(DPT_INT16, count_of(rank.rank(), peer), rank.rank(), peer));
        expected.push_back(part(DPT_INT16, count_of(peer, rank.rank()), peer, rank.rank()));
        gathered.push_back(part(DPT_INT16, count_of(peer, 0), peer));
        sent_counts.push_back(sent.back().count());
        expected_counts.push_back(expected.back().count());
        gathered_counts.push_back(gathered.back().count());
      }
      // A rank whose own parts are of one size may not say that they are uneven.
      run_parts(rank,
                Request(DPT_ALL_TO_ALL, DPT_INT16, 0).counts(sent_counts, expected_counts),
                sent,
                expected,
                mix);
      run_parts(rank,
                Request(DPT_ALL_GATHER, DPT_INT16, gathered_counts[rank.rank()])
                    .counts({}, gathered_counts),
                {gathered[rank.rank()]},
                gathered,
                mix);
    }
  });
}

TEST_P(Parts, MovesEvenPartsToAll) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const int mix : kMixes) {
      for (const size_t count : kUnevenCounts) {
        std::vector<Elements> sent;
        std::vector<Elements> expected;
        for (int peer = 0; peer < rank.size(); ++peer) {
          sent.push_back(part(DPT_FLOAT64, count, rank.rank(), peer));
          expected.push_back(part(DPT_FLOAT64, count, peer, rank.rank()));
        }
        run_parts(rank, Request(DPT_ALL_TO_ALL, DPT_FLOAT64, count), sent, expected, mix);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(GroupSizes,
                         Parts,
                         ::testing::Range(1, 6),
                         ::testing::PrintToStringParamName());

TEST(UnevenParts, ThatDoNotFitAreAnErrorOnEveryRankAndLeaveTheGroupUsable) {
  run_ranks(3, [](Rank& rank) {
    // Rank 1 believes that it gets 5 elements from rank 2, which sends 4.
    const std::vector<size_t> even = {4, 4, 4};
    const std::vector<size_t> odd = {4, 4, 5};
    const std::vector<Elements> parts(3, part(DPT_INT32, 5, 0));
    const Failure failure = failure_of([&] {
      run_parts(rank,
                Request(DPT_ALL_TO_ALL, DPT_INT32, 4).counts(even, rank.rank() == 1 ? odd : even),
                parts,
                parts,
                0);
    });
    EXPECT_EQ(failure.status, DPT_ERR_MISMATCH);
    EXPECT_THAT(failure.what(), HasSubstr("rank 2 sends 16 bytes to rank 1, which expects 20"));
    const std::vector<Elements> gathered(3, part(DPT_INT32, 4, 1));
    run_parts(rank, Request(DPT_ALL_GATHER, DPT_INT32, 4), {gathered[0]}, gathered, 0);
  });
}

}  // namespace
}  // namespace dpt::testing
