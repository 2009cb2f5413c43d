// Several groups at once, asynchronous operations, and groups that are made again.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <set>

#include "comm/fabric.hpp"
#include "comm/statistics.hpp"
#include "rank_threads.hpp"
#include "transport/shm/shm_transport.hpp"

namespace dpt::testing {
namespace {

Request sum(std::vector<float>& values) {
  Request request(DPT_ALL_REDUCE, DPT_FLOAT32, values.size());
  request.reduce_op(DPT_SUM).input(values.data()).output(values.data());
  return request;
}

int count_of(const std::vector<uint64_t>& affinity) {
  int cores = 0;
  for (const uint64_t bits : affinity) cores += std::popcount(bits);
  return cores;
}

// As where Slurm or numactl gives each rank cores of its own.
TEST(Groups, RanksHaveTheCoresOfAllOfThem) {
  const Fabric& fabric = Fabric::instance();
  const PeerInfo self = fabric.self(0);
  PeerInfo other = self;
  const int own = fabric.cores_together({self});
  EXPECT_EQ(own, self.usable_cores);
  EXPECT_EQ(fabric.cores_together({self, other}), own);
  if (own < count_of(self.affinity)) return;  // a quota, which they share
  other.affinity.assign(self.affinity.size() + 1, 0);
  other.affinity.back() = 0b111;
  EXPECT_EQ(fabric.cores_together({self, other}), own + 3);
}

std::multiset<std::string> open_files() {
  std::multiset<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // that of the iterator itself
    found.insert(std::filesystem::read_symlink(entry.path(), gone));
  }
  return found;
}

// As where the store is lost after the ranks of a node have met.
TEST(Groups, LeaveNothingOpenWhenTheyFailBetweenMeetingAndTheFirstOperation) {
  Fabric& fabric = Fabric::instance();
  HashStore store;
  const std::vector<int64_t> ranks = {0};
  const std::vector<PeerInfo> peers = {fabric.self(0)};
  const WaitContext wait{
      Deadline(std::chrono::seconds(5)), [] { return std::string("meeting"); }, nullptr};
  const auto stays = fabric.memory().hold();
  fabric.memory().file();
  const auto before = open_files();
  {
    const ShmConnection connection = connect_shm(
        {store, "lost", 0, ranks, peers, 1 << 20, fabric.memory(), fabric.peer_pools()}, wait);
    EXPECT_EQ(connection.why_not, "");
    EXPECT_GT(open_files().size(), before.size());
  }
  EXPECT_EQ(open_files(), before);
}

TEST(Groups, WorkAtTheSameTimeInAnyOrder) {
  constexpr int kGroups = 6;
  constexpr int kSize = 3;
  HashStore store;
  run_threads(kSize, [&](int index) {
    std::vector<std::unique_ptr<Rank>> groups;
    for (int group = 0; group < kGroups; ++group) {
      groups.push_back(std::make_unique<Rank>(
          store, index, kSize, RankOptions{.group = "many" + std::to_string(group)}));
    }
    for (auto& group : groups) group->barrier();
    for (int round = 0; round < 5; ++round) {
      std::vector<std::vector<float>> values(kGroups);
      std::vector<Pending> pending(kGroups);
      for (int i = 0; i < kGroups; ++i) {
        // Each rank starts them in an order of its own.
        const int group = (i * (index == 1 ? 5 : 1) + index) % kGroups;
        values[group].assign(1 + group * 9001, static_cast<float>(index + group));
        pending[group] = groups[group]->start(sum(values[group]));
      }
      for (int group = 0; group < kGroups; ++group) {
        pending[group].get();
        const auto expected = static_cast<float>(3 * group + 3);
        ASSERT_EQ(values[group], std::vector<float>(1 + group * 9001, expected));
      }
    }
    // Destroyed in an order of its own too.
    for (int i = 0; i < kGroups; ++i) groups[(i + 2 * index) % kGroups].reset();
  });
}

TEST(Groups, OfDifferentRanksOverlap) {
  // Rows and columns of a 2 x 2 mesh.
  HashStore store;
  run_threads(4, [&](int index) {
    const int row = index / 2;
    const int column = index % 2;
    Rank in_row(store, column, 2, {.group = "row" + std::to_string(row)});
    Rank in_column(store, row, 2, {.group = "column" + std::to_string(column)});
    for (int round = 0; round < 20; ++round) {
      std::vector<float> values(5000, static_cast<float>(index));
      in_row.run(sum(values));
      in_column.run(sum(values));
      ASSERT_EQ(values, std::vector<float>(5000, 6.0F));
    }
  });
}

TEST(Asynchronous, OperationsTakeEffectInTheOrderOfTheirStart) {
  run_ranks(3, [](Rank& rank) {
    // Each operation works on the result of the one before it.
    std::vector<float> values(3000, 1.0F);
    std::vector<Pending> pending;
    for (int i = 0; i < 12; ++i) pending.push_back(rank.start(sum(values)));
    // A synchronous one behind them comes last.
    rank.run(sum(values));
    // They are told of beside it, so not all need to be ready by now.
    for (Pending& each : pending) each.get();
    EXPECT_EQ(values, std::vector<float>(3000, 1594323.0F));  // 3^13
  });
}

TEST(Asynchronous, DestroyWaitsForWhatIsUnderWay) {
  std::vector<float> results[2];
  std::vector<Pending> pending[2];
  run_ranks(2, [&](Rank& rank) {
    auto& values = results[rank.rank()];
    values.assign(200000, 1.0F);
    for (int i = 0; i < 5; ++i) pending[rank.rank()].push_back(rank.start(sum(values)));
  });
  for (int rank = 0; rank < 2; ++rank) {
    for (Pending& each : pending[rank]) each.get();
    EXPECT_EQ(results[rank], std::vector<float>(200000, 32.0F));
  }
}

TEST(Asynchronous, ThreadsOfOneRankShareAGroup) {
  // Symmetric operations, so that it does not matter which thread comes first.
  run_ranks(2, [](Rank& rank) {
    run_threads(3, [&](int) {
      for (int round = 0; round < 20; ++round) {
        std::vector<float> values(700, 1.0F);
        rank.run(sum(values));
        ASSERT_EQ(values, std::vector<float>(700, 2.0F));
      }
    });
  });
}

TEST(Again, ASameNamedGroupOnTheSameStore) {
  HashStore store;
  run_threads(3, [&](int index) {
    for (int round = 0; round < 5; ++round) {
      Rank rank(store, index, 3, {.group = "again"});
      std::vector<float> values(100, static_cast<float>(round));
      rank.run(sum(values));
      ASSERT_EQ(values, std::vector<float>(100, 3.0F * static_cast<float>(round)));
    }
  });
}

TEST(Again, ItsStatisticsCountOn) {
  for (int round = 0; round < 3; ++round) {
    run_ranks(1, [](Rank& rank) { rank.barrier(); }, {.group = "made again"});
  }
  const std::vector<StatisticsRow> all = all_statistics();
  const auto is_counted = [](const StatisticsRow& row) { return row.group == "made again"; };
  ASSERT_EQ(std::count_if(all.begin(), all.end(), is_counted), 1);
  EXPECT_EQ(std::find_if(all.begin(), all.end(), is_counted)->calls, 3U);
}

TEST(Again, WithAMemberThatIsNew) {
  // A process that was in a group of this name before meets one that was not. This happens when a
  // training job replaces a lost worker, on a new store.
  for (const int size : {2, 3}) {
    run_ranks(size,
              [](Rank& rank) {
                std::vector<float> values(100, 1.0F);
                rank.run(sum(values));
                EXPECT_EQ(values, std::vector<float>(100, static_cast<float>(rank.size())));
              },
              {.group = "elastic"});
  }
}

TEST(Again, AfterAFailure) {
  HashStore store;
  run_threads(2, [&](int index) {
    {
      Rank rank(store, index, 2, {.group = "phoenix"});
      rank.barrier();
      rank.abort("for the test");
      failure_of([&] { rank.barrier(); });
    }
    Rank rank(store, index, 2, {.group = "phoenix"});
    rank.barrier();
  });
}

TEST(Groups, SixtyFour) {
  HashStore store;
  run_threads(2, [&](int index) {
    std::vector<std::unique_ptr<Rank>> groups;
    for (int group = 0; group < 64; ++group) {
      groups.push_back(std::make_unique<Rank>(
          store, index, 2, RankOptions{.group = "megatron" + std::to_string(group)}));
      std::vector<float> values(10, 1.0F);
      groups.back()->run(sum(values));
      ASSERT_EQ(values, std::vector<float>(10, 2.0F));
    }
  });
}

}  // namespace
}  // namespace dpt::testing
