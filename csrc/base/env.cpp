#include "base/env.hpp"

#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#include "base/error.hpp"

namespace dpt {
namespace {

std::mutex given_mutex;
std::map<std::string, std::string>& given() {
  static auto* const variables = new std::map<std::string, std::string>;
  return *variables;
}

const char* look_up(const char* name) {
  const std::lock_guard lock(given_mutex);
  const auto found = given().find(name);
  return found != given().end() ? found->second.c_str() : std::getenv(name);
}

LogLevel read_log_level() {
  const char* value = look_up("DEEPYTORCH_LOG");
  if (value == nullptr) return LogLevel::kInfo;
  const std::string name = value;
  if (name == "debug") return LogLevel::kDebug;
  if (name == "warning") return LogLevel::kWarning;
  if (name == "error") return LogLevel::kError;
  return LogLevel::kInfo;
}

// A whole number in [least, most] that is a multiple of `step`; 0 where there is none.
size_t read_number(const char* name, size_t least, size_t most, size_t step = 1) {
  const char* value = look_up(name);
  if (value == nullptr || *value == '\0') return 0;
  char* end = nullptr;
  const unsigned long long number = std::strtoull(value, &end, 10);
  if (*end != '\0' || number < least || number > most || number % step != 0) {
    const std::string kind = step == 1 ? "a whole number" : "a multiple of " + std::to_string(step);
    throw Error(DPT_ERR_INVALID,
                std::string(name) + "=" + value + ": expected " + kind + " between " +
                    std::to_string(least) + " and " + std::to_string(most));
  }
  return number;
}

bool read_switch(const char* name) {
  const char* value = look_up(name);
  const std::string text = value == nullptr ? "" : value;
  if (text == "1") return true;
  if (text.empty() || text == "0") return false;
  throw Error(DPT_ERR_INVALID, std::string(name) + "=" + text + ": expected 0 or 1");
}

std::string read_text(const char* name) {
  const char* value = look_up(name);
  return value == nullptr ? "" : value;
}

int read_gpu_queues() {
  constexpr int kUsual = 8;
  try {
    const auto number = static_cast<int>(read_number("CUDA_DEVICE_MAX_CONNECTIONS", 1, 32));
    return number == 0 ? kUsual : number;
  } catch (const Error&) {
    return kUsual;  // the driver is no more particular
  }
}

std::vector<std::string> read_list(const char* name) {
  std::vector<std::string> words;
  std::istringstream in(read_text(name));
  for (std::string word; std::getline(in, word, ',');) {
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

}  // namespace

void set_variable(const std::string& name, const std::string& value) {
  const std::lock_guard lock(given_mutex);
  given()[name] = value;
}

const Env& env() {
  static const Env instance{
      .log_level = read_log_level(),
      .chunk_bytes = read_number("DEEPYTORCH_CHUNK_BYTES", 64, 256 << 10, 64),
      .ifnames = read_list("DEEPYTORCH_IFNAME"),
      .num_sockets = static_cast<int>(read_number("DEEPYTORCH_NUM_SOCKETS", 1, 64)),
      .socket_bytes = read_number("DEEPYTORCH_SOCKET_BYTES", 64 << 10, 1 << 30),
      .tcp_congestion = read_text("DEEPYTORCH_TCP_CONGESTION"),
      .tcp_checksum = read_switch("DEEPYTORCH_TCP_CHECKSUM"),
      .node_ids = read_list("DEEPYTORCH_NODE_ID"),
      .emulated_links = read_text("DEEPYTORCH_EMULATE_LINKS"),
      .reduce_threads = static_cast<int>(read_number("DEEPYTORCH_REDUCE_THREADS", 1, 64)),
      .gpu_channels = static_cast<int>(read_number("DEEPYTORCH_GPU_CHANNELS", 2, 64)),
      .no_peer_access = read_text("NCCL_P2P_DISABLE") == "1",
      .gpu_queues = read_gpu_queues(),
      .nccl_table = read_text("DEEPYTORCH_NCCL_TABLE")};
  return instance;
}

}  // namespace dpt
