// The all_reduce along trees, against sums in double. Ranks that are no neighbours have no way to
// each other's memory here, so that touching it crashes.
#include "cuda/trees/tree_all_reduce.hpp"
#include "emulated_group.hpp"

namespace dpt::cuda {
namespace {

// By the parents of every rank, a row for each root.
Trees trees_of(const std::vector<std::vector<int>>& rows) {
  Trees trees;
  std::fill_n(trees.parent[0], kMaxRanks * kMaxRanks, int8_t{-1});
  for (size_t root = 0; root < rows.size(); ++root) {
    std::copy(rows[root].begin(), rows[root].end(), trees.parent[root]);
  }
  return trees;
}
Trees stars_of(int ranks) {
  std::vector<std::vector<int>> rows(ranks, std::vector<int>(ranks));
  for (int root = 0; root < ranks; ++root) {
    for (int rank = 0; rank < ranks; ++rank) rows[root][rank] = rank == root ? -1 : root;
  }
  return trees_of(rows);
}
// Each rank's parent is the one before it: links that all trees but one share.
Trees chains_of(int ranks) {
  std::vector<std::vector<int>> rows(ranks, std::vector<int>(ranks));
  for (int root = 0; root < ranks; ++root) {
    for (int rank = 0; rank < ranks; ++rank) {
      rows[root][rank] = rank == root ? -1 : rank < root ? rank + 1 : rank - 1;
    }
  }
  return trees_of(rows);
}
// 0-1 and 2-3 are near each other: over the far links go two shares of four in each direction.
const Trees kPairs = trees_of({{-1, 0, 3, 0}, {1, -1, 1, 2}, {1, 2, -1, 2}, {3, 0, 3, -1}});

std::vector<uint32_t> neighbours_in(const Trees& trees, int ranks) {
  std::vector<uint32_t> neighbours(ranks, 0);
  for (int root = 0; root < ranks; ++root) {
    for (int rank = 0; rank < ranks; ++rank) {
      const int parent = trees.parent[root][rank];
      if (parent < 0) continue;
      neighbours[rank] |= 1u << parent;
      neighbours[parent] |= 1u << rank;
    }
  }
  return neighbours;
}

struct Case {
  size_t count;
  size_t shift = 0;
  ReduceOp op = DPT_SUM;
  double factor = 1;
  bool lands = false;  // the outputs are registered memory
};

template <typename T>
void check(EmulatedGroup& group, int ranks, const Trees& trees, const Case& of) {
  const auto seed = static_cast<unsigned>(of.count + of.shift);
  const bool in_place = of.count % 2 == 1;
  const size_t bytes = of.count * sizeof(T);
  auto inputs = random_inputs<T>(ranks, of.count, of.shift, seed);
  auto originals = random_inputs<T>(ranks, of.count, of.shift, seed);
  std::vector<Shifted<T>> outputs;
  std::vector<char*> results;
  for (int rank = 0; rank < ranks; ++rank) {
    outputs.emplace_back(of.count, of.shift);
    results.push_back(of.lands   ? group.pool(rank) + rank * kLandingUnit
                      : in_place ? inputs[rank].bytes()
                                 : outputs[rank].bytes());
    ASSERT_LE(bytes + ranks * kLandingUnit, EmulatedGroup::kPoolBytes);
    if (in_place) std::memmove(results[rank], inputs[rank].bytes(), bytes);
  }
  group.run([&](int rank, Launch launch) {
    launch.call.landings = of.lands ? ~0u : 0;
    const double average = of.op == DPT_AVG ? 1.0 / ranks : 1;
    const char* const input = in_place ? results[rank] : inputs[rank].bytes();
    tree_all_reduce(
        launch, {input, results[rank], bytes, of.factor, average, trees}, dtype_of<T>(), of.op);
  });
  group.expect_healthy();
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(std::memcmp(results[rank], results[0], bytes), 0) << "rank " << rank;
  }
  // Every hop may round.
  const double most = tolerance<T>() * 100.0 * ranks * ranks;
  for (size_t i = 0; i < of.count; ++i) {
    T value;
    std::memcpy(&value, results[0] + i * sizeof(T), sizeof(T));
    ASSERT_NEAR(as_double<T>(value), of.factor * expected_of(originals, i, of.op), most)
        << "element " << i << " of " << of.count;
  }
}

TEST(TreeAllReduce, OfBridgedPairs) {
  EmulatedGroup group(4);
  group.leave_neighbours(neighbours_in(kPairs, 4));  // a ring without diagonals
  for (const size_t count : {1, 333, 3001}) {
    check<float>(group, 4, kPairs, {count, count % 3});
    check<__nv_bfloat16>(group, 4, kPairs, {count + 1, count % 5, DPT_AVG});
  }
}

TEST(TreeAllReduce, OfOtherTypesAndFactors) {
  EmulatedGroup group(4);
  group.leave_neighbours(neighbours_in(kPairs, 4));
  check<__half>(group, 4, kPairs, {777, 0});
  check<float>(group, 4, kPairs, {900, 0, DPT_PREMUL_SUM, 0.5});
  check<__nv_bfloat16>(group, 4, kPairs, {1000, 0, DPT_SUM, 1, /*lands=*/true});
}

TEST(TreeAllReduce, AlongChains) {
  for (const int ranks : {2, 3, 5}) {
    EmulatedGroup group(ranks);
    group.leave_neighbours(neighbours_in(chains_of(ranks), ranks));
    for (const size_t count : {3, 1301}) {  // more chunks than a queue holds
      check<float>(group, ranks, chains_of(ranks), {count, count % 2});
      check<float>(group, ranks, chains_of(ranks), {count, 0, DPT_SUM, 1, /*lands=*/true});
    }
  }
}

TEST(TreeAllReduce, ChunksLandMostlyInRegisteredOutputs) {
  EmulatedGroup group(4);
  group.leave_neighbours(neighbours_in(kPairs, 4));
  for (int times = 0; times < 2; ++times) {
    check<float>(group, 4, kPairs, {4000, 0, DPT_SUM, 1, /*lands=*/true});
  }
  int landed = 0;
  for (int rank = 0; rank < 4; ++rank) landed += group.num_landed(rank);
  EXPECT_GT(landed, 0);
}

// Stars add in rank order, as two_shot_all_reduce does.
TEST(TreeAllReduce, OfStarsHasTheBitsOfTwoShot) {
  constexpr size_t kCount = 1234;
  EmulatedGroup group(3);
  auto inputs = random_inputs<__nv_bfloat16>(3, kCount, 0, 1);
  std::vector<__nv_bfloat16> one[3];
  std::vector<__nv_bfloat16> other[3];
  group.run([&](int rank, const Launch& launch) {
    one[rank].resize(kCount);
    other[rank].resize(kCount);
    const auto* const from = inputs[rank].bytes();
    auto* const to = reinterpret_cast<char*>(one[rank].data());
    tree_all_reduce(launch, {from, to, kCount * 2, 1, 1, stars_of(3)}, DPT_BFLOAT16, DPT_SUM);
    auto* const also = reinterpret_cast<char*>(other[rank].data());
    two_shot_all_reduce(launch, {from, also, kCount * 2, 1, 1}, DPT_BFLOAT16, DPT_SUM);
  });
  group.expect_healthy();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(std::memcmp(one[rank].data(), other[rank].data(), kCount * 2), 0);
  }
}

// Between other kernels on the same queues.
TEST(TreeAllReduce, MixedOnOneGroup) {
  EmulatedGroup group(4);
  std::mt19937 random(7);
  for (int round = 0; round < 10; ++round) {
    const size_t count = random() % 1500 + 1;
    if (random() % 2 == 0) {
      const Trees trees = random() % 2 == 0 ? kPairs : chains_of(4);
      check<float>(group, 4, trees, {count, random() % 3, DPT_SUM, 1, random() % 3 == 0});
      continue;
    }
    std::vector<std::vector<float>> data(4, std::vector<float>(count, 1));
    const bool small = count < 60;
    group.run([&](int rank, const Launch& launch) {
      auto* const bytes = reinterpret_cast<char*>(data[rank].data());
      if (small) {
        ReduceArguments arguments{{}, bytes, count * 4, 1, 1};
        for (const char*& part : arguments.parts) part = bytes;
        return low_latency_reduce(launch, arguments, DPT_FLOAT32, DPT_SUM);
      }
      two_shot_all_reduce(launch, {bytes, bytes, count * 4, 1, 1}, DPT_FLOAT32, DPT_SUM);
    });
    for (const auto& each : data) EXPECT_EQ(each, std::vector<float>(count, 4));
  }
}

TEST(TreeAllReduce, ANeighbourThatNeverComesIsATimeout) {
  EmulatedGroup group(4);
  group.leave_neighbours(neighbours_in(kPairs, 4));
  std::vector<float> data(2000, 1);
  group.run(
      [&](int rank, const Launch& launch) {
        if (rank != 0) return;
        auto* const bytes = reinterpret_cast<char*>(data.data());
        tree_all_reduce(launch, {bytes, bytes, 8000, 1, 1, kPairs}, DPT_FLOAT32, DPT_SUM);
      },
      {2, 64},
      std::chrono::milliseconds(50));
  EXPECT_EQ(group.status(0).code, HostStatus::kTimeout);
  EXPECT_TRUE(group.status(0).peer == 1 || group.status(0).peer == 3);
}

}  // namespace
}  // namespace dpt::cuda
