// Plans between nodes describe themselves. tests/network checks on real links that nodes send as
// much as is said here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "algorithms/algorithm.hpp"
#include "algorithms/outline.hpp"
#include "node_layouts.hpp"
#include "units.hpp"

namespace dpt::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Rails = std::vector<std::vector<int>>;

Outline outline_of(Collective collective,
                   const std::vector<int>& sizes,
                   size_t count,
                   DataType dtype = DPT_FLOAT32,
                   AlgorithmName algorithm = AlgorithmName::kHierarchical) {
  const NodeRun run{algorithm, collective, dtype, 0, count, 512 * kKiB};
  const std::vector<Outline> found = outline(run, nodes_of(sizes));
  EXPECT_EQ(found.size(), 1u);
  return found.at(0);
}

std::vector<std::string> places(const Outline& outline) {
  std::vector<std::string> places;
  for (const Phase& phase : outline.phases) places.push_back(phase.where);
  return places;
}

TEST(Outline, OfTwoNodesExchangesEachRailsShare) {
  const Outline found = outline_of(DPT_ALL_REDUCE, {2, 2}, 256 * kKiB);
  EXPECT_STREQ(found.way, "direct");
  EXPECT_EQ(found.rails, (Rails{{0, 2}, {1, 3}}));
  EXPECT_EQ(found.pieces, 2u);
  EXPECT_EQ(found.piece_bytes, 512 * kKiB);
  EXPECT_EQ(found.sent_bytes, 1024 * kKiB);
  EXPECT_THAT(places(found), ElementsAre(kWithin, kBetween, kWithin));
  EXPECT_EQ(found.phases[0].bytes, 256 * kKiB);
  EXPECT_EQ(found.phases[1].bytes, 256 * kKiB);
}

TEST(Outline, OfOneRankPerNodeHasNoPhaseWithinNodes) {
  for (const Collective collective :
       {DPT_ALL_REDUCE, DPT_REDUCE, DPT_REDUCE_SCATTER, DPT_BROADCAST, DPT_ALL_GATHER}) {
    EXPECT_THAT(places(outline_of(collective, {1, 1, 1}, 100 * kKiB)), ElementsAre(kBetween));
    const AlgorithmName small = AlgorithmName::kNodeOneShot;
    EXPECT_THAT(places(outline_of(collective, {1, 1}, 100, DPT_FLOAT32, small)),
                ElementsAre(kBetween));
  }
}

// 16-bit floats would be rounded at every hop.
TEST(Outline, GoesRoundARingAboveEightNodes) {
  const size_t count = 9 * 16 * 100;
  const std::vector<int> nine(9, 1);
  const Outline ring = outline_of(DPT_ALL_REDUCE, nine, count);
  EXPECT_STREQ(ring.way, "ring");
  EXPECT_EQ(ring.sent_bytes, 2 * 8 * count * 4 / 9);
  EXPECT_EQ(ring.phases[0].bytes, count * 4 / 9);
  EXPECT_THAT(ring.phases[0].what, HasSubstr("8 hops"));
  for (const auto& [collective, sizes, dtype] :
       {std::tuple{DPT_ALL_REDUCE, nine, DPT_BFLOAT16},
        std::tuple{DPT_REDUCE, nine, DPT_FLOAT32},
        std::tuple{DPT_ALL_REDUCE, std::vector<int>(8, 1), DPT_FLOAT32}}) {
    EXPECT_STREQ(outline_of(collective, sizes, count, dtype).way, "direct");
  }
}

TEST(Outline, NamesPartnersWhereNodesDiffer) {
  EXPECT_EQ(outline_of(DPT_ALL_REDUCE, {3, 2}, 1000).rails, (Rails{{0, 3}, {1, 4}}));
  const Outline found = outline_of(DPT_ALL_GATHER, {3, 2}, 1000);
  EXPECT_EQ(found.rails, (Rails{{0, 3}, {1, 4}, {2, 3}}));
  EXPECT_EQ(found.sent_bytes, 3 * 4000u);
  EXPECT_EQ(outline_of(DPT_REDUCE_SCATTER, {3, 2}, 1000).sent_bytes, 3 * 4000u);
  EXPECT_EQ(outline_of(DPT_ALL_TO_ALL, {3, 2}, 1000).sent_bytes, 6 * 4000u);
  EXPECT_EQ(outline_of(DPT_SCATTER, {3, 2}, 1000).sent_bytes, 2 * 4000u);
  EXPECT_EQ(outline_of(DPT_GATHER, {3, 2}, 1000).sent_bytes, 2 * 4000u);
  EXPECT_EQ(outline_of(DPT_REDUCE, {2, 2, 2}, 3200).sent_bytes, 3200 * 4u);
}

TEST(Outline, OfSmallMessagesNamesTheLeaders) {
  const Outline found =
      outline_of(DPT_ALL_GATHER, {2, 3, 1}, 10, DPT_FLOAT32, AlgorithmName::kNodeOneShot);
  EXPECT_EQ(found.rails, (Rails{{0, 2, 5}}));
  EXPECT_EQ(found.sent_bytes, 2 * 3 * 40u);
}

TEST(Outline, IsOnlyOfPlansBetweenNodes) {
  for (const AlgorithmName algorithm :
       {AlgorithmName::kPipelined, AlgorithmName::kDelegate, AlgorithmName::kInStages}) {
    const NodeRun run{algorithm, DPT_ALL_REDUCE, DPT_FLOAT32, 0, 1000, 512 * kKiB};
    EXPECT_TRUE(outline(run, nodes_of({2, 2})).empty());
  }
}

}  // namespace
}  // namespace dpt::testing
