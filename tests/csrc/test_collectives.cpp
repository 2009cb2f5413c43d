// Every collective, data type and group size against a scalar reference.
#include <gtest/gtest.h>

#include "base/types.hpp"
#include "comm/statistics.hpp"
#include "elements.hpp"
#include "host/reduce.hpp"
#include "rank_threads.hpp"

namespace dpt::testing {
namespace {

const std::vector<DataType> kAllTypes = {DPT_BOOL,
                                         DPT_INT8,
                                         DPT_UINT8,
                                         DPT_INT16,
                                         DPT_INT32,
                                         DPT_INT64,
                                         DPT_FLOAT16,
                                         DPT_BFLOAT16,
                                         DPT_FLOAT32,
                                         DPT_FLOAT64,
                                         DPT_COMPLEX64,
                                         DPT_COMPLEX128};
const std::vector<ReduceOp> kAllOps = {
    DPT_SUM, DPT_AVG, DPT_PRODUCT, DPT_MIN, DPT_MAX, DPT_PREMUL_SUM, DPT_BAND, DPT_BOR, DPT_BXOR};
// Nothing, one, around a cache line, and past every threshold and chunk.
const std::vector<size_t> kCounts = {0, 1, 17, 1023, 40001};

double factor_of(int rank) { return 0.5 * (rank + 1); }

std::string label(DataType dtype, ReduceOp op, size_t count) {
  return std::string(name_of(op)) + " of " + std::to_string(count) + " x " + name_of(dtype);
}

// Inputs of all ranks, which every thread can make for itself.
std::vector<Elements> all_inputs(DataType dtype, size_t count, int size, int salt = 0) {
  std::vector<Elements> inputs;
  for (int rank = 0; rank < size; ++rank) {
    inputs.emplace_back(dtype, count);
    inputs.back().fill(rank, salt);
  }
  return inputs;
}

std::vector<double> all_factors(int size) {
  std::vector<double> factors;
  for (int rank = 0; rank < size; ++rank) factors.push_back(factor_of(rank));
  return factors;
}

class Collectives : public ::testing::TestWithParam<int> {};

TEST_P(Collectives, AllReduceOfEveryTypeAndOp) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const DataType dtype : kAllTypes) {
      for (const ReduceOp op : kAllOps) {
        if (!can_reduce(dtype, op)) continue;
        for (const size_t count : {size_t{17}, size_t{9001}}) {
          const std::vector<Elements> inputs = all_inputs(dtype, count, rank.size());
          const Elements expected = reference_reduce(op, inputs, all_factors(rank.size()));
          Elements output(dtype, count);
          Request request(DPT_ALL_REDUCE, dtype, count);
          request.reduce_op(op, factor_of(rank.rank()))
              .input(inputs[rank.rank()].data())
              .output(output.data());
          EXPECT_EQ(rank.run(request), DPT_COMPLETED);
          EXPECT_TRUE(output == expected) << label(dtype, op, count);
        }
      }
    }
  });
}

TEST_P(Collectives, AllReduceInPlaceOfEverySize) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const DataType dtype : {DPT_FLOAT32, DPT_BFLOAT16, DPT_FLOAT64}) {
      for (const size_t count : kCounts) {
        std::vector<Elements> inputs = all_inputs(dtype, count, rank.size());
        const Elements expected = reference_reduce(DPT_SUM, inputs);
        Elements& mine = inputs[rank.rank()];
        rank.run(Request(DPT_ALL_REDUCE, dtype, count)
                     .reduce_op(DPT_SUM)
                     .input(mine.data())
                     .output(mine.data()));
        EXPECT_TRUE(mine == expected) << label(dtype, DPT_SUM, count);
      }
    }
  });
}

TEST_P(Collectives, AllGather) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const DataType dtype : kAllTypes) {
      for (const size_t count : kCounts) {
        const std::vector<Elements> inputs = all_inputs(dtype, count, rank.size());
        std::vector<Elements> outputs(rank.size(), Elements(dtype, count));
        Request request(DPT_ALL_GATHER, dtype, count);
        request.input(inputs[rank.rank()].data());
        for (Elements& output : outputs) request.output(output.data());
        rank.run(request);
        EXPECT_TRUE(outputs == inputs) << label(dtype, DPT_NO_REDUCE, count);
      }
    }
  });
}

TEST_P(Collectives, AllGatherFromItsOwnPlaceInTheOutput) {
  run_ranks(GetParam(), [](Rank& rank) {
    const size_t count = 40001;
    const std::vector<Elements> inputs = all_inputs(DPT_FLOAT32, count, rank.size());
    std::vector<Elements> outputs(rank.size(), Elements(DPT_FLOAT32, count));
    outputs[rank.rank()] = inputs[rank.rank()];
    Request request(DPT_ALL_GATHER, DPT_FLOAT32, count);
    request.input(outputs[rank.rank()].data());
    for (Elements& output : outputs) request.output(output.data());
    rank.run(request);
    EXPECT_TRUE(outputs == inputs);
  });
}

TEST_P(Collectives, ReduceScatter) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const DataType dtype : {DPT_FLOAT32, DPT_BFLOAT16, DPT_FLOAT64, DPT_INT32}) {
      for (const ReduceOp op : {DPT_SUM, DPT_AVG, DPT_PREMUL_SUM, DPT_MAX}) {
        if (!can_reduce(dtype, op)) continue;
        for (const size_t count : kCounts) {
          // inputs[peer] is what this rank gives to `peer`; the salt says for whom it is.
          std::vector<Elements> inputs;
          for (int peer = 0; peer < rank.size(); ++peer) {
            inputs.push_back(all_inputs(dtype, count, rank.size(), peer)[rank.rank()]);
          }
          const Elements expected = reference_reduce(
              op, all_inputs(dtype, count, rank.size(), rank.rank()), all_factors(rank.size()));
          Elements output(dtype, count);
          Request request(DPT_REDUCE_SCATTER, dtype, count);
          request.reduce_op(op, factor_of(rank.rank())).output(output.data());
          for (const Elements& input : inputs) request.input(input.data());
          rank.run(request);
          EXPECT_TRUE(output == expected) << label(dtype, op, count);
        }
      }
    }
  });
}

TEST_P(Collectives, BroadcastFromEveryRoot) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (int root = 0; root < rank.size(); ++root) {
      for (const DataType dtype : {DPT_FLOAT32, DPT_INT8, DPT_COMPLEX128}) {
        for (const size_t count : kCounts) {
          std::vector<Elements> inputs = all_inputs(dtype, count, rank.size());
          const Elements expected = inputs[root];
          Elements& mine = inputs[rank.rank()];
          rank.run(Request(DPT_BROADCAST, dtype, count)
                       .root(root)
                       .input(mine.data())
                       .output(mine.data()));
          EXPECT_TRUE(mine == expected) << label(dtype, DPT_NO_REDUCE, count) << ", root " << root;
        }
      }
    }
  });
}

TEST_P(Collectives, BarrierHoldsEveryoneBack) {
  std::atomic<int> arrived = 0;
  run_ranks(GetParam(), [&](Rank& rank) {
    for (int round = 1; round <= 20; ++round) {
      arrived += 1;
      rank.barrier();
      EXPECT_GE(arrived, round * rank.size());
      rank.barrier();
    }
  });
}

TEST_P(Collectives, ManyInARowOfChangingSizes) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (int round = 0; round < 60; ++round) {
      const size_t count = (round * 7919) % 30011;
      std::vector<Elements> inputs = all_inputs(DPT_FLOAT32, count, rank.size(), round);
      const Elements expected = reference_reduce(DPT_SUM, inputs);
      Elements& mine = inputs[rank.rank()];
      rank.run(Request(DPT_ALL_REDUCE, DPT_FLOAT32, count)
                   .reduce_op(DPT_SUM)
                   .input(mine.data())
                   .output(mine.data()));
      ASSERT_TRUE(mine == expected) << "round " << round << ", " << count << " elements";
    }
  });
}

INSTANTIATE_TEST_SUITE_P(GroupSizes,
                         Collectives,
                         ::testing::Range(1, 6),
                         ::testing::PrintToStringParamName());

TEST(CollectivesRounding, SameBitsOnEveryRankAndOneRounding) {
  // Values whose sum depends on the order, and on when it is rounded.
  const int size = 4;
  const size_t count = 5000;
  std::vector<Elements> results(size, Elements(DPT_BFLOAT16, count));
  auto value = [](int rank, size_t i) {
    return static_cast<double>((i * 31 + rank * 17) % 97) * (rank % 2 ? 0.01 : -3.0);
  };
  run_ranks(size, [&](Rank& rank) {
    Elements mine(DPT_BFLOAT16, count);
    for (size_t i = 0; i < count; ++i) mine.set(i, value(rank.rank(), i));
    rank.run(Request(DPT_ALL_REDUCE, DPT_BFLOAT16, count)
                 .reduce_op(DPT_SUM)
                 .input(mine.data())
                 .output(results[rank.rank()].data()));
  });
  Elements expected(DPT_BFLOAT16, count);
  for (size_t i = 0; i < count; ++i) {
    Elements rounded(DPT_BFLOAT16, 1);
    float sum = 0;
    for (int rank = 0; rank < size; ++rank) {
      rounded.set(0, value(rank, i));
      sum += static_cast<float>(rounded.get(0));
    }
    expected.set(i, sum);
  }
  for (const Elements& result : results) EXPECT_TRUE(result == expected);
}

TEST(CollectivesStatistics, NativeCallsAreCounted) {
  reset_statistics();
  run_ranks(2,
            [](Rank& rank) {
              float value = 1;
              rank.run(Request(DPT_ALL_REDUCE, DPT_FLOAT32, 1)
                           .reduce_op(DPT_SUM)
                           .input(&value)
                           .output(&value));
              EXPECT_EQ(value, 2);
            },
            {.group = "counted"});
  uint64_t calls = 0;
  uint64_t bytes = 0;
  for (const StatisticsRow& row : all_statistics()) {
    if (row.group != "counted") continue;
    EXPECT_EQ(row.collective, DPT_ALL_REDUCE);
    EXPECT_NE(row.algorithm, AlgorithmName::kDelegate);
    EXPECT_FALSE(row.reason.empty());
    calls += row.calls;
    bytes += row.bytes;
  }
  EXPECT_EQ(calls, 2U);  // one per rank
  EXPECT_EQ(bytes, 8U);
}

}  // namespace
}  // namespace dpt::testing
