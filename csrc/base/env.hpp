// Every environment variable of the native core, read once; getenv appears nowhere else.
#pragma once

#include <cstddef>
#include <string>

#include "base/log.hpp"

namespace dpt {

struct Env {
  // DEEPYTORCH_LOG: least severe message written to stderr. Default info.
  LogLevel log_level;
  // DEEPYTORCH_CHUNK_BYTES: pipeline step of shared-memory algorithms, a multiple of 64 up to
  // 262144, the same on every rank. Default 0: the tuner's choice.
  size_t chunk_bytes;
  // DEEPYTORCH_NCCL_TABLE: the file that the tuner plugin for NCCL goes by. Default none.
  std::string nccl_table;
};

const Env& env();

}  // namespace dpt
