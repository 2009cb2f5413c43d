// Groups that span nodes: every collective, over layouts of emulated nodes, against the scalar
// reference. Ranks are threads and nodes are names, so that data crosses the loopback interface.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "algorithms/block_sizes.hpp"
#include "comm/fabric.hpp"
#include "comm/statistics.hpp"
#include "elements.hpp"
#include "host/reduce.hpp"
#include "node_layouts.hpp"
#include "rank_threads.hpp"
#include "transport/node_layout.hpp"

namespace dpt::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The node of each rank, a letter each.
class Nodes : public ::testing::TestWithParam<const char*> {
 protected:
  Nodes() {
    std::vector<std::string> names;
    for (const char* node = GetParam(); *node != '\0'; ++node) names.emplace_back(1, *node);
    size_ = static_cast<int>(names.size());
    Fabric::instance().emulate_nodes(names);
  }
  ~Nodes() override { Fabric::instance().emulate_nodes({}); }
  int size() const { return size_; }

 private:
  int size_;
};

TEST(NodeLayout, NoTwoNodesSendToTheSameAtATime) {
  NodeLayout layout;
  for (int node = 0; node < 5; ++node) layout.ranks.push_back({node});
  for (size_t turn = 0; turn < 4; ++turn) {
    std::vector<int> receivers;
    for (int node = 0; node < 5; ++node) {
      ASSERT_EQ(layout.others(node).size(), 4u);
      receivers.push_back(layout.others(node)[turn]);
      EXPECT_NE(receivers.back(), node);
    }
    EXPECT_THAT(receivers, ::testing::UnorderedElementsAre(0, 1, 2, 3, 4));
  }
}

TEST(BlockSizes, FitWhereANodeCanSayThem) {
  EXPECT_TRUE(BlockSizes::fit(DPT_ALL_GATHER, nodes_of({63, 63})));
  EXPECT_FALSE(BlockSizes::fit(DPT_ALL_GATHER, nodes_of({64, 64})));
  EXPECT_FALSE(BlockSizes::fit(DPT_ALL_GATHER, nodes_of({82, 18})));
  EXPECT_TRUE(BlockSizes::fit(DPT_ALL_TO_ALL, nodes_of({45, 45})));
  EXPECT_FALSE(BlockSizes::fit(DPT_ALL_TO_ALL, nodes_of({64, 8})));
  EXPECT_FALSE(BlockSizes::fit(DPT_ALL_TO_ALL, nodes_of({46, 45})));
  EXPECT_TRUE(BlockSizes::fit(DPT_ALL_REDUCE, nodes_of({512, 512})));
}

// Around a cache line, past the leaders' exchange, and past several chunks.
const std::vector<size_t> kCounts = {0, 17, 1023, 40001, 300007};
const std::vector<size_t> kFewCounts = {1, 1023, 40001};

double factor_of(int rank) { return 0.5 * (rank + 1); }

std::vector<double> all_factors(int size) {
  std::vector<double> factors;
  for (int rank = 0; rank < size; ++rank) factors.push_back(factor_of(rank));
  return factors;
}

std::string label(DataType dtype, ReduceOp op, size_t count) {
  return std::string(name_of(op)) + " of " + std::to_string(count) + " x " + name_of(dtype);
}

std::vector<Elements> all_inputs(DataType dtype, size_t count, int size, int salt = 0) {
  std::vector<Elements> inputs;
  for (int rank = 0; rank < size; ++rank) {
    inputs.emplace_back(dtype, count);
    inputs.back().fill(rank, salt);
  }
  return inputs;
}

// Averages of averages may differ in the last bit where a node's count is no power of two.
bool near(const Elements& one, const Elements& other) {
  for (size_t i = 0; i < one.count(); ++i) {
    const double a = one.get(i);
    const double b = other.get(i);
    if (!(a == b) && std::abs(a - b) > 0.01 * std::max(std::abs(a), std::abs(b))) return false;
  }
  return true;
}

bool has_two_levels(DataType dtype, ReduceOp op) { return op == DPT_AVG && size_of(dtype) == 2; }

TEST_P(Nodes, AllReduceOfEveryTypeAndOp) {
  run_ranks(size(), [](Rank& rank) {
    for (const DataType dtype :
         {DPT_BOOL, DPT_INT64, DPT_FLOAT16, DPT_BFLOAT16, DPT_FLOAT32, DPT_COMPLEX64}) {
      for (const ReduceOp op :
           {DPT_SUM, DPT_AVG, DPT_PRODUCT, DPT_MIN, DPT_MAX, DPT_PREMUL_SUM, DPT_BXOR}) {
        if (!can_reduce(dtype, op)) continue;
        for (const size_t count : {size_t{17}, size_t{40001}}) {
          // Products of many leave the range of small types.
          if (op == DPT_PRODUCT && rank.size() > 4) continue;
          const std::vector<Elements> inputs = all_inputs(dtype, count, rank.size());
          const Elements expected = reference_reduce(op, inputs, all_factors(rank.size()));
          Elements output(dtype, count);
          Request request(DPT_ALL_REDUCE, dtype, count);
          request.reduce_op(op, factor_of(rank.rank()))
              .input(inputs[rank.rank()].data())
              .output(output.data());
          EXPECT_EQ(rank.run(request), DPT_COMPLETED);
          const bool good = has_two_levels(dtype, op) ? near(output, expected) : output == expected;
          EXPECT_TRUE(good) << label(dtype, op, count);
        }
      }
    }
  });
}

TEST_P(Nodes, AllReduceInPlaceOfEverySize) {
  run_ranks(size(), [](Rank& rank) {
    for (const DataType dtype : {DPT_FLOAT32, DPT_BFLOAT16}) {
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

TEST_P(Nodes, ReduceToEveryRoot) {
  run_ranks(size(), [](Rank& rank) {
    for (int root = 0; root < rank.size(); ++root) {
      for (const size_t count : kFewCounts) {
        const std::vector<Elements> inputs = all_inputs(DPT_FLOAT32, count, rank.size());
        const Elements expected = reference_reduce(DPT_SUM, inputs);
        Elements output(DPT_FLOAT32, count);
        output.fill(77);
        const Elements before = output;
        rank.run(Request(DPT_REDUCE, DPT_FLOAT32, count)
                     .reduce_op(DPT_SUM)
                     .root(root)
                     .input(inputs[rank.rank()].data())
                     .output(output.data()));
        EXPECT_TRUE(output == (rank.rank() == root ? expected : before)) << count;
      }
    }
  });
}

TEST_P(Nodes, ReduceScatter) {
  run_ranks(size(), [](Rank& rank) {
    for (const DataType dtype : {DPT_FLOAT32, DPT_BFLOAT16, DPT_INT32}) {
      for (const ReduceOp op : {DPT_SUM, DPT_AVG, DPT_PREMUL_SUM}) {
        if (!can_reduce(dtype, op)) continue;
        for (const size_t count : kFewCounts) {
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
          const bool good = has_two_levels(dtype, op) ? near(output, expected) : output == expected;
          EXPECT_TRUE(good) << label(dtype, op, count);
        }
      }
    }
  });
}

TEST_P(Nodes, AllGatherAlsoOfUnevenParts) {
  run_ranks(size(), [](Rank& rank) {
    for (const bool uneven : {false, true}) {
      for (const size_t count : kCounts) {
        std::vector<Elements> inputs;
        std::vector<size_t> counts;
        for (int peer = 0; peer < rank.size(); ++peer) {
          counts.push_back(uneven ? count * peer / 2 : count);
          inputs.emplace_back(DPT_FLOAT32, counts.back());
          inputs.back().fill(peer);
        }
        std::vector<Elements> outputs;
        for (const size_t each : counts) outputs.emplace_back(DPT_FLOAT32, each);
        Request request(DPT_ALL_GATHER, DPT_FLOAT32, counts[rank.rank()]);
        request.input(inputs[rank.rank()].data());
        for (Elements& output : outputs) request.output(output.data());
        if (uneven) request.counts({}, counts);
        rank.run(request);
        EXPECT_TRUE(outputs == inputs) << count << (uneven ? " uneven" : "");
      }
    }
  });
}

TEST_P(Nodes, BroadcastFromEveryRoot) {
  run_ranks(size(), [](Rank& rank) {
    for (int root = 0; root < rank.size(); ++root) {
      for (const size_t count : {size_t{0}, size_t{17}, size_t{40001}, size_t{300007}}) {
        std::vector<Elements> inputs = all_inputs(DPT_FLOAT32, count, rank.size());
        const Elements expected = inputs[root];
        Elements& mine = inputs[rank.rank()];
        rank.run(Request(DPT_BROADCAST, DPT_FLOAT32, count)
                     .root(root)
                     .input(mine.data())
                     .output(mine.data()));
        EXPECT_TRUE(mine == expected) << count << ", root " << root;
      }
    }
  });
}

TEST_P(Nodes, GatherAndScatterAtEveryRoot) {
  run_ranks(size(), [](Rank& rank) {
    for (int root = 0; root < rank.size(); ++root) {
      for (const size_t count : kFewCounts) {
        const std::vector<Elements> inputs = all_inputs(DPT_FLOAT32, count, rank.size());
        const bool is_root = rank.rank() == root;
        std::vector<Elements> outputs(is_root ? rank.size() : 0, Elements(DPT_FLOAT32, count));
        Request gather(DPT_GATHER, DPT_FLOAT32, count);
        gather.root(root).input(inputs[rank.rank()].data());
        for (Elements& output : outputs) gather.output(output.data());
        rank.run(gather);
        EXPECT_TRUE(!is_root || outputs == inputs) << "gather " << count;

        Elements output(DPT_FLOAT32, count);
        Request scatter(DPT_SCATTER, DPT_FLOAT32, count);
        scatter.root(root).output(output.data());
        if (is_root) {
          for (const Elements& input : inputs) scatter.input(input.data());
        }
        rank.run(scatter);
        EXPECT_TRUE(output == inputs[rank.rank()]) << "scatter " << count;
      }
    }
  });
}

TEST_P(Nodes, AllToAllAlsoOfUnevenParts) {
  run_ranks(size(), [](Rank& rank) {
    for (const bool uneven : {false, true}) {
      for (const size_t count : kFewCounts) {
        const auto count_of = [&](int from, int to) {
          return uneven ? count * ((from + 2 * to) % 4) : count;
        };
        std::vector<Elements> inputs;
        std::vector<Elements> outputs;
        std::vector<Elements> expected;
        std::vector<size_t> input_counts;
        std::vector<size_t> output_counts;
        for (int peer = 0; peer < rank.size(); ++peer) {
          input_counts.push_back(count_of(rank.rank(), peer));
          inputs.emplace_back(DPT_FLOAT32, input_counts.back());
          inputs.back().fill(rank.rank(), peer);
          output_counts.push_back(count_of(peer, rank.rank()));
          outputs.emplace_back(DPT_FLOAT32, output_counts.back());
          expected.emplace_back(DPT_FLOAT32, output_counts.back());
          expected.back().fill(peer, rank.rank());
        }
        Request request(DPT_ALL_TO_ALL, DPT_FLOAT32, count);
        for (int peer = 0; peer < rank.size(); ++peer) {
          request.input(inputs[peer].data()).output(outputs[peer].data());
        }
        if (uneven) request.counts(input_counts, output_counts);
        rank.run(request);
        EXPECT_TRUE(outputs == expected) << count << (uneven ? " uneven" : "");
      }
    }
  });
}

TEST_P(Nodes, BarrierHoldsEveryoneBack) {
  std::atomic<int> arrived = 0;
  run_ranks(size(), [&](Rank& rank) {
    for (int round = 1; round <= 10; ++round) {
      arrived += 1;
      rank.barrier();
      EXPECT_GE(arrived.load(), round * rank.size());
    }
  });
}

TEST_P(Nodes, MismatchIsAnErrorOnEveryRankAndLeavesTheGroupUsable) {
  run_ranks(size(), [](Rank& rank) {
    for (const size_t count : {size_t{10}, size_t{100000}}) {
      const bool odd = rank.rank() == rank.size() - 1;
      std::vector<float> values(count + 1, 1.0F);
      Request wrong(DPT_ALL_REDUCE, DPT_FLOAT32, odd ? count + 1 : count);
      wrong.reduce_op(DPT_SUM).input(values.data()).output(values.data());
      const Failure failure = failure_of([&] { rank.run(wrong); });
      EXPECT_EQ(failure.status, DPT_ERR_MISMATCH);
      EXPECT_THAT(failure.what(),
                  AllOf(HasSubstr(std::to_string(count) + " x"),
                        HasSubstr(std::to_string(count + 1) + " x")));
      std::vector<float> good(40000, 1.0F);
      rank.run(Request(DPT_ALL_REDUCE, DPT_FLOAT32, good.size())
                   .reduce_op(DPT_SUM)
                   .input(good.data())
                   .output(good.data()));
      EXPECT_EQ(good, std::vector<float>(40000, static_cast<float>(rank.size())));
    }
  });
}

// One rank per node; cyclic; shuffled and uneven; three nodes.
INSTANTIATE_TEST_SUITE_P(Layouts, Nodes, ::testing::Values("ab", "abab", "baabb", "abcbc"));

class RingOfNodes : public Nodes {};

TEST_P(RingOfNodes, AddUp) {
  run_ranks(size(), [](Rank& rank) {
    for (const DataType dtype : {DPT_FLOAT32, DPT_BFLOAT16}) {
      for (const ReduceOp op : {DPT_SUM, DPT_AVG, DPT_PREMUL_SUM, DPT_MAX}) {
        for (const size_t count : {size_t{30001}, size_t{200003}}) {
          if (count > 30001 && op != DPT_AVG) continue;
          const std::vector<Elements> inputs = all_inputs(dtype, count, rank.size());
          const Elements expected = reference_reduce(op, inputs, all_factors(rank.size()));
          Elements output(dtype, count);
          rank.run(Request(DPT_ALL_REDUCE, dtype, count)
                       .reduce_op(op, factor_of(rank.rank()))
                       .input(inputs[rank.rank()].data())
                       .output(output.data()));
          // Orders differ, and so does the last bit of an average.
          EXPECT_TRUE(near(output, expected)) << label(dtype, op, count);
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, RingOfNodes, ::testing::Values("abcdefghia"));

}  // namespace
}  // namespace dpt::testing
