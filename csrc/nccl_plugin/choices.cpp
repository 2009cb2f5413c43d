#include "nccl_plugin/choices.hpp"

#include <array>
#include <limits>
#include <string_view>

#include "base/error.hpp"
#include "base/json.hpp"
#include "nccl_plugin/tuner_abi.hpp"

namespace dpt::nccl_plugin {
namespace {

struct Name {
  std::string_view name;
  int number;
};

constexpr std::array<Name, 5> kCollectives = {{{"broadcast", kNcclBroadcast},
                                               {"reduce", kNcclReduce},
                                               {"all_gather", kNcclAllGather},
                                               {"reduce_scatter", kNcclReduceScatter},
                                               {"all_reduce", kNcclAllReduce}}};
constexpr std::array<Name, 7> kAlgorithms = {{{"tree", 0},
                                              {"ring", 1},
                                              {"collnet_direct", 2},
                                              {"collnet_chain", 3},
                                              {"nvls", 4},
                                              {"nvls_tree", 5},
                                              {"pat", 6}}};
constexpr std::array<Name, 3> kProtocols = {{{"ll", 0}, {"ll128", 1}, {"simple", 2}}};
constexpr int kVersion = 1;

[[noreturn]] void fail(const std::string& where, const std::string& what) {
  throw Error(DPT_ERR_INVALID, where + ": " + what);
}

const json::Value& member(const json::Object& object, const std::string& where, const char* name) {
  for (const auto& [key, value] : object) {
    if (key == name) return value;
  }
  fail(where, std::string("lacks \"") + name + "\"");
}

template <typename T>
const T& get(const json::Value& value, const std::string& where) {
  if (const T* data = value.get_if<T>()) return *data;
  fail(where, std::string("expected ") + json::Value{T{}}.kind() + ", found " + value.kind());
}

int64_t number(const json::Object& object, const std::string& where, const char* name) {
  const int64_t value = get<int64_t>(member(object, where, name), where + "." + name);
  if (value < 0) fail(where + "." + name, "is negative");
  return value;
}

template <size_t N>
int named(const json::Object& object,
          const std::string& where,
          const char* field,
          const std::array<Name, N>& names) {
  const auto& text = get<std::string>(member(object, where, field), where + "." + field);
  std::string known;
  for (const Name& name : names) {
    if (name.name == text) return name.number;
    known += (known.empty() ? "" : ", ") + std::string(name.name);
  }
  fail(where + "." + field, "\"" + text + "\" is none of " + known);
}

Choice parse_choice(const json::Value& value, const std::string& where) {
  const auto& object = get<json::Object>(value, where);
  Choice choice;
  choice.function = named(object, where, "collective", kCollectives);
  choice.first_bytes = number(object, where, "first_bytes");
  choice.last_bytes = number(object, where, "last_bytes");
  choice.nodes = number(object, where, "nodes");
  choice.ranks = number(object, where, "ranks");
  choice.algorithm = named(object, where, "algorithm", kAlgorithms);
  choice.protocol = named(object, where, "protocol", kProtocols);
  const int64_t channels = number(object, where, "channels");
  if (channels > std::numeric_limits<int>::max()) fail(where + ".channels", "is too large");
  choice.channels = static_cast<int>(channels);
  if (choice.last_bytes < choice.first_bytes) fail(where, "its range of sizes is empty");
  return choice;
}

}  // namespace

std::vector<Choice> parse_choices(const std::string& text) {
  const json::Value root = json::parse(text);
  const auto& object = get<json::Object>(root, "the table");
  const int64_t version = number(object, "the table", "version");
  if (version != kVersion) {
    fail("the table",
         "is of version " + std::to_string(version) + ", this release reads " +
             std::to_string(kVersion));
  }
  std::vector<Choice> choices;
  for (const json::Value& value :
       get<json::Array>(member(object, "the table", "choices"), "choices")) {
    choices.push_back(parse_choice(value, "choices[" + std::to_string(choices.size()) + "]"));
  }
  return choices;
}

const Choice* find_choice(const std::vector<Choice>& choices, int function, size_t num_bytes) {
  const auto bytes = static_cast<uint64_t>(num_bytes);
  for (const Choice& choice : choices) {
    if (choice.function == function && static_cast<uint64_t>(choice.first_bytes) <= bytes &&
        bytes <= static_cast<uint64_t>(choice.last_bytes)) {
      return &choice;
    }
  }
  return nullptr;
}

std::vector<Choice> choices_for(const std::vector<Choice>& choices, size_t nodes, size_t ranks) {
  std::vector<Choice> own;
  for (const Choice& choice : choices) {
    const bool fits_nodes = choice.nodes == 0 || static_cast<size_t>(choice.nodes) == nodes;
    const bool fits_ranks = choice.ranks == 0 || static_cast<size_t>(choice.ranks) == ranks;
    if (fits_nodes && fits_ranks) own.push_back(choice);
  }
  return own;
}

}  // namespace dpt::nccl_plugin
