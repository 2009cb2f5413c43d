#include "base/env.hpp"

#include <cstdlib>
#include <string>

#include "base/error.hpp"

namespace dpt {
namespace {

LogLevel read_log_level() {
  const char* value = std::getenv("DEEPYTORCH_LOG");
  if (value == nullptr) return LogLevel::kInfo;
  const std::string name = value;
  if (name == "debug") return LogLevel::kDebug;
  if (name == "warning") return LogLevel::kWarning;
  if (name == "error") return LogLevel::kError;
  return LogLevel::kInfo;
}

size_t read_chunk_bytes() {
  const char* value = std::getenv("DEEPYTORCH_CHUNK_BYTES");
  if (value == nullptr || *value == '\0') return 0;
  char* end = nullptr;
  const unsigned long long bytes = std::strtoull(value, &end, 10);
  if (*end != '\0' || bytes == 0 || bytes % 64 != 0 || bytes > (256u << 10)) {
    throw Error(DPT_ERR_INVALID,
                std::string("DEEPYTORCH_CHUNK_BYTES=") + value +
                    ": expected a multiple of 64 between 64 and 262144");
  }
  return bytes;
}

std::string read_nccl_table() {
  const char* value = std::getenv("DEEPYTORCH_NCCL_TABLE");
  return value == nullptr ? "" : value;
}

}  // namespace

const Env& env() {
  static const Env instance{read_log_level(), read_chunk_bytes(), read_nccl_table()};
  return instance;
}

}  // namespace dpt
