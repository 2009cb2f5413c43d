// Chooses the operations that the flight record learns the calling line of.
//
// To find it takes the GIL: a microsecond where that is free, 5 ms where another thread runs
// Python. So it is a sample: of each kind of operation the first, and then a few a second.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "deepytorch.h"
#include "python_bridge.hpp"

namespace dpt::c10d_adapter {

inline dpt_place place_of(const CodeLine& line) {
  return {line.file.c_str(), line.function.c_str(), line.line};
}

// Those of one group. Thread safety: any thread.
class CallingLines {
 public:
  explicit CallingLines(const dpt_api* api) : api_(api) {}

  // Whether this operation is one of the sample: then this thread is to find its line.
  bool is_due(const dpt_request& request);
  // The line that this thread calls from.
  static std::optional<CodeLine> find();
  // Tells the flight record of the line, if this operation is one of the sample. It is called once
  // the operation has begun, so that other ranks don't wait for this one's GIL.
  void note(const dpt_request& request, uint64_t recorded) {
    if (recorded != 0 && is_due(request)) record(recorded);
  }

 private:
  void record(uint64_t recorded) const;

  const dpt_api* api_;
  // By operation: a bit for each power of two of a size that has been there.
  std::array<std::atomic<uint64_t>, DPT_RECV + 1> seen_{};
};

}  // namespace dpt::c10d_adapter
