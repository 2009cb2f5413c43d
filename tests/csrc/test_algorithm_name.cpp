// Algorithms' public names, which profiles, reports and messages hold.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "base/algorithm_name.hpp"
#include "tuner/table.hpp"

namespace dpt::testing {
namespace {

std::vector<AlgorithmName> all_algorithms() {
  std::vector<AlgorithmName> all;
  for (int i = 0; i < kNumAlgorithmNames; ++i) all.push_back(static_cast<AlgorithmName>(i));
  return all;
}

TEST(AlgorithmName, EachHasAPublicNameAndComesBackFromIt) {
  std::map<std::string, int> names;
  for (const AlgorithmName each : all_algorithms()) {
    const std::string name = name_of(each);
    ++names[name];
    EXPECT_NE(name, "unknown algorithm") << static_cast<int>(each);
    EXPECT_EQ(algorithm_named(name, each == AlgorithmName::kInStages), each) << name;
  }
  for (const auto& [name, times] : names) EXPECT_EQ(times, name == "hierarchical" ? 2 : 1) << name;
}

TEST(AlgorithmName, OneIsOfTwoAlgorithms) {
  EXPECT_EQ(algorithm_named("hierarchical", /*on_device=*/false), AlgorithmName::kHierarchical);
  EXPECT_EQ(algorithm_named("hierarchical", /*on_device=*/true), AlgorithmName::kInStages);
}

TEST(AlgorithmName, NoneIsOfOtherWords) {
  for (const bool on_device : {false, true}) {
    for (const char* word : {"", "Delegate", "delegate ", "unknown algorithm", "in_stages"}) {
      EXPECT_EQ(algorithm_named(word, on_device), std::nullopt) << word;
    }
  }
}

// Profiles of earlier versions hold these.
TEST(AlgorithmName, StaysAsProfilesHaveIt) {
  for (const char* name : {"delegate",
                           "one_shot",
                           "pipelined",
                           "exchange",
                           "hierarchical",
                           "low_latency",
                           "packet",
                           "two_shot",
                           "tree",
                           "push",
                           "copy_engine",
                           "ring",
                           "cpu_reduce"}) {
    for (const bool on_device : {false, true}) {
      const auto known = known_algorithm(name, on_device);
      ASSERT_TRUE(known.has_value()) << name;
      EXPECT_STREQ(name_of(*known), name);
    }
  }
  for (const char* name : {"local", "barrier", "mailbox", "node_barrier", "node_one_shot"}) {
    EXPECT_EQ(known_algorithm(name, false), std::nullopt) << name;
  }
}

}  // namespace
}  // namespace dpt::testing
