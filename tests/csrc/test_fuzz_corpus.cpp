// A short, repeatable part of `make fuzz`: the kept inputs, and some made of them by small changes.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "../fuzz/targets.hpp"

namespace dpt::testing {
namespace {

using fuzz::Target;

std::vector<std::string> corpus_of(const std::string& target) {
  std::vector<std::filesystem::path> files;
  const auto folder = std::filesystem::path(DPT_FUZZ_CORPUS) / target;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::vector<std::string> inputs;
  for (const auto& file : files) {
    std::ostringstream text;
    text << std::ifstream(file, std::ios::binary).rdbuf();
    inputs.push_back(text.str());
  }
  return inputs;
}

// One small change, as fuzzers make them.
std::string changed(std::string input, std::mt19937& dice) {
  const size_t at = input.empty() ? 0 : dice() % input.size();
  switch (dice() % 4) {
    case 0:
      input.insert(at, 1, static_cast<char>(dice()));
      break;
    case 1:
      input.erase(at, dice() % 8);
      break;
    case 2:
      input.insert(at, input.substr(dice() % (input.size() + 1), dice() % 32));
      break;
    default:
      if (!input.empty()) input[at] = static_cast<char>(input[at] ^ (1 << dice() % 8));
  }
  return input;
}

class FuzzCorpus : public ::testing::TestWithParam<std::pair<std::string, Target>> {};

TEST_P(FuzzCorpus, BreaksNoPromise) {
  const auto& [name, target] = GetParam();
  const std::vector<std::string> inputs = corpus_of(name);
  ASSERT_FALSE(inputs.empty()) << name;
  std::mt19937 dice(1);
  const int changes = name == "framing" || name == "control" ? 3 : 100;
  for (const std::string& input : inputs) {
    std::string now = input;
    for (int i = 0; i <= changes; ++i) {
      target(reinterpret_cast<const uint8_t*>(now.data()), now.size());
      now = changed(i % 10 == 9 ? input : now, dice);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets,
                         FuzzCorpus,
                         ::testing::ValuesIn(fuzz::targets()),
                         [](const auto& info) { return info.param.first; });

}  // namespace
}  // namespace dpt::testing
