// The profile: what is written is read back, by who it is for, and nothing else is believed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/error.hpp"
#include "topology/topology.hpp"
#include "tuner/profile.hpp"

namespace dpt::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const ProfileKey kKey{"a machine", "1.2.3", {4, true}};

TimingTable table_with(Collective collective, int bucket, double median_us) {
  TimingTable table;
  table.at(collective, bucket) = {
      {{AlgorithmName::kPipelined, 65536}, median_us, median_us - 1, median_us + 1.5},
      {{AlgorithmName::kDelegate, 0}, 1000, 900, 1100}};
  return table;
}

std::string message_of(const std::string& text, const ProfileKey& key = kKey) {
  try {
    find_in_profile(text, key);
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), DPT_ERR_INVALID);
    return error.what();
  }
  return "no error";
}

TEST(Profile, GivesBackWhatWasPutIn) {
  const std::string text = merge_into_profile("", kKey, table_with(DPT_BROADCAST, 2, 123.5));
  const auto found = find_in_profile(text, kKey);
  ASSERT_TRUE(found);
  const Entry& entry = found->at(DPT_BROADCAST, 2);
  ASSERT_EQ(entry.size(), 2);
  EXPECT_EQ(entry[0].candidate.algorithm, AlgorithmName::kPipelined);
  EXPECT_EQ(entry[0].candidate.chunk_bytes, 65536);
  EXPECT_DOUBLE_EQ(entry[0].median_us, 123.5);
  EXPECT_DOUBLE_EQ(entry[0].low_us, 122.5);
  EXPECT_DOUBLE_EQ(entry[0].high_us, 125);
  EXPECT_TRUE(is_delegate(entry[1].candidate));
  EXPECT_TRUE(found->at(DPT_BROADCAST, 1).empty());
  // People can read it.
  EXPECT_THAT(text, HasSubstr("\"collective\": \"broadcast\""));
  EXPECT_THAT(text, HasSubstr("\"median_us\": 123.5"));
}

TEST(Profile, KeepsWhatThePythonSidePutIn) {
  const std::string before =
      R"({"format": 1, "groups": [], "decisions": [{"chosen": "inductor", "for": {"n": 2}}]})";
  const std::string text = merge_into_profile(before, kKey, table_with(DPT_BROADCAST, 2, 10));
  EXPECT_TRUE(find_in_profile(text, kKey));
  EXPECT_THAT(text, HasSubstr("\"chosen\": \"inductor\""));
  EXPECT_THAT(text, HasSubstr("\"n\": 2"));
  const std::string older = R"({"format": 0, "decisions": []})";
  EXPECT_THAT(merge_into_profile(older, kKey, table_with(DPT_BROADCAST, 2, 10)),
              Not(HasSubstr("decisions")));
}

TEST(Profile, KeepsWhatOthersPutIn) {
  std::string text = merge_into_profile("", kKey, table_with(DPT_BROADCAST, 2, 10));
  ProfileKey other = kKey;
  other.group.ranks = 8;
  text = merge_into_profile(text, other, table_with(DPT_ALL_REDUCE, 1, 20));
  text = merge_into_profile(text, kKey, table_with(DPT_ALL_REDUCE, 1, 30));
  text = merge_into_profile(text, kKey, table_with(DPT_BROADCAST, 2, 40));
  EXPECT_DOUBLE_EQ(find_in_profile(text, other)->at(DPT_ALL_REDUCE, 1)[0].median_us, 20);
  EXPECT_DOUBLE_EQ(find_in_profile(text, kKey)->at(DPT_ALL_REDUCE, 1)[0].median_us, 30);
  EXPECT_DOUBLE_EQ(find_in_profile(text, kKey)->at(DPT_BROADCAST, 2)[0].median_us, 40);
}

TEST(Profile, IsForOneMachineVersionAndShape) {
  const std::string text = merge_into_profile("", kKey, table_with(DPT_BROADCAST, 2, 10));
  EXPECT_FALSE(find_in_profile(text, {"another machine", kKey.version, kKey.group}));
  EXPECT_FALSE(find_in_profile(text, {kKey.machine, "1.2.4", kKey.group}));
  EXPECT_FALSE(find_in_profile(text, {kKey.machine, kKey.version, {2, true}}));
  EXPECT_FALSE(find_in_profile(text, {kKey.machine, kKey.version, {4, false}}));
  EXPECT_FALSE(find_in_profile("", kKey));
}

TEST(Profile, KeepsGridsOfTheDeviceApartFromTheHosts) {
  const ProfileKey device{"a GPU", "1.2.3", {4, false, 1, "a GPU"}};
  TimingTable table;
  table.at(DPT_ALL_REDUCE, kNumBuckets - 1) = {
      {{AlgorithmName::kTwoShot, 4096, 32, 512}, 1234.56, 1230, 1240},
      {{AlgorithmName::kDelegate}, 1300, 1290, 1310}};
  std::string text = merge_into_profile("", kKey, table_with(DPT_BROADCAST, 2, 10));
  const std::string host_only = text;
  text = merge_into_profile(text, device, table);
  const Entry entry = find_in_profile(text, device)->at(DPT_ALL_REDUCE, kNumBuckets - 1);
  ASSERT_EQ(entry.size(), 2);
  EXPECT_EQ(entry[0].candidate.chunk_bytes, 4096);
  EXPECT_EQ(entry[0].candidate.channels, 32);
  EXPECT_EQ(entry[0].candidate.threads, 512);
  EXPECT_DOUBLE_EQ(entry[0].median_us, 1234.56);
  EXPECT_EQ(entry[1].candidate.channels, 0);
  EXPECT_THAT(text, HasSubstr("\"on_device\": true"));
  EXPECT_TRUE(find_in_profile(text, kKey));
  EXPECT_FALSE(find_in_profile(text, {"another GPU", "1.2.3", {4, false, 1, "another GPU"}}));
  // The same words for the machine do not make a host's table a device's.
  EXPECT_FALSE(find_in_profile(text, {"a GPU", "1.2.3", {4, false}}));
  // Host tables are written as they always were.
  EXPECT_THAT(host_only, Not(HasSubstr("on_device")));
  EXPECT_THAT(host_only, Not(HasSubstr("channels")));
}

TEST(Profile, KeepsTheDelegatesPart) {
  const ProfileKey device{"a GPU", "1.2.3", {4, false, 1, "a GPU"}};
  TimingTable table;
  table.at(DPT_ALL_REDUCE, 3) = {{{AlgorithmName::kCpuReduce, 1 << 20, 3, 4, 40}, 10, 9, 11},
                                 {{AlgorithmName::kCpuReduce, 1 << 20, 3, 4}, 20, 19, 21}};
  std::string text = merge_into_profile("", device, table);
  const Entry entry = find_in_profile(text, device)->at(DPT_ALL_REDUCE, 3);
  EXPECT_EQ(entry.at(0).candidate.delegated, 40);
  EXPECT_EQ(entry.at(1).candidate.delegated, 0);
  text.replace(text.find("\"delegated\": 40"), 15, "\"delegated\": 100");
  EXPECT_THAT(message_of(text, device), HasSubstr("times[0].delegated is 100"));
}

TEST(Profile, WithoutWhatDevicesAddedIsReadable) {
  const std::string older = R"({"format": 1, "groups": [{"machine": "a machine",
    "deepytorch": "1.2.3", "ranks": 4, "oversubscribed": true, "measured": [
    {"collective": "all_reduce", "bytes": 1048576, "times": [{"algorithm": "pipelined",
     "chunk_bytes": 65536, "median_us": 10.5, "spread_us": [10.0, 11.0]}]}]}]})";
  const auto found = find_in_profile(older, kKey);
  ASSERT_TRUE(found);
  EXPECT_DOUBLE_EQ(found->at(DPT_ALL_REDUCE, 2).at(0).median_us, 10.5);
  EXPECT_EQ(found->at(DPT_ALL_REDUCE, 2)[0].candidate.threads, 0);
  std::string wrong = older;
  wrong.replace(
      wrong.find("\"chunk_bytes\": 65536"), 20, "\"chunk_bytes\": 65536, \"threads\": -1");
  EXPECT_THAT(message_of(wrong), HasSubstr("times[0].threads is -1"));
}

TEST(Profile, OfAnotherFormatIsReplaced) {
  const std::string later = R"({"format": 99, "groups": "who knows"})";
  EXPECT_FALSE(find_in_profile(later, kKey));
  const std::string text = merge_into_profile(later, kKey, table_with(DPT_BROADCAST, 2, 10));
  EXPECT_TRUE(find_in_profile(text, kKey));
}

TEST(Profile, NamesTheWrongField) {
  EXPECT_THAT(message_of("gibberish"), HasSubstr("line 1"));
  EXPECT_THAT(message_of("[]"), HasSubstr("the profile is an array, not an object"));
  EXPECT_THAT(message_of("{}"), HasSubstr("the profile lacks \"format\""));
  EXPECT_THAT(message_of(R"({"format": 1, "groups": [{"machine": 3}]})"),
              HasSubstr("groups[0].machine is an integer"));
  const std::string good = merge_into_profile("", kKey, table_with(DPT_BROADCAST, 2, 10));
  const auto with = [&](const std::string& what, const std::string& instead) {
    std::string text = good;
    EXPECT_NE(text.find(what), std::string::npos) << what;
    return message_of(text.replace(text.find(what), what.size(), instead));
  };
  EXPECT_THAT(with("\"broadcast\"", "\"brodcast\""), HasSubstr("groups[0].measured[0].collective"));
  EXPECT_THAT(with("\"pipelined\"", "\"magic\""), HasSubstr("there is no algorithm magic"));
  EXPECT_THAT(with("65536", "65537"), HasSubstr("measured[0].times[0].chunk_bytes is 65537"));
  EXPECT_THAT(with("65536", "-64"), HasSubstr("chunk_bytes is -64"));
  EXPECT_THAT(with("10.00", "\"ten\""), HasSubstr("median_us is a string, not a number"));
  EXPECT_THAT(with("1048576", "1048577"), HasSubstr("bytes is no size that is measured"));
}

TEST(Profile, NamesTheMachine) {
  EXPECT_THAT(describe_machine(), HasSubstr("hardware threads"));
  EXPECT_EQ(describe_machine(), describe_machine());
  EXPECT_EQ(describe_machine({.sys = "/nowhere", .proc = "/nowhere"}).find("unnamed CPU, "), 0);
}

class ProfileFile : public ::testing::Test {
 protected:
  ProfileFile() { std::filesystem::create_directories(folder_); }
  ~ProfileFile() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("deepytorch-profile-" + std::to_string(getpid()));
};

TEST_F(ProfileFile, IsReplacedInOneStep) {
  const std::string path = folder_ / "new" / "profile.json";
  EXPECT_EQ(read_profile(path), "");
  write_profile(path, "first");
  write_profile(path, "second");
  EXPECT_EQ(read_profile(path), "second");
  // No temporary file stays behind.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_ / "new"), {}), 1);
}

TEST_F(ProfileFile, OfSomebodyElseIsNotBelieved) {
  const std::string path = folder_ / "profile.json";
  write_profile(path, "text");
  chmod(path.c_str(), 0666);
  try {
    read_profile(path);
    ADD_FAILURE() << "it was believed";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), DPT_ERR_INVALID);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("can be written by others"), HasSubstr("chmod")));
  }
  chmod(path.c_str(), 0664);
  EXPECT_EQ(read_profile(path), "text");
  if (geteuid() != 0) return;
  ASSERT_EQ(chown(path.c_str(), 12345, 12345), 0);
  EXPECT_THROW(read_profile(path), Error);
}

TEST_F(ProfileFile, WhereNoneCanBeSaysSo) {
  std::ofstream(folder_ / "file") << "in the way";
  const std::string path = folder_ / "file" / "profile.json";
  EXPECT_THROW(write_profile(path, "text"), Error);
  EXPECT_EQ(read_profile(path), "");
}

}  // namespace
}  // namespace dpt::testing
