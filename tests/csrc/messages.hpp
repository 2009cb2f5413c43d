// Sends and receives of whole numbers, as requests.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "rank_threads.hpp"

namespace dpt::testing {

using Values = std::vector<int32_t>;

inline Request send(const Values& values, int to, int tag = 0) {
  Request request(DPT_SEND, DPT_INT32, values.size());
  request.root(to).input(values.data());
  request.request.tag = tag;
  return request;
}

inline Request recv(Values& values, int from, int tag = 0) {
  Request request(DPT_RECV, DPT_INT32, values.size());
  request.root(from).output(values.data());
  request.request.tag = tag;
  return request;
}

inline Request recv_any(Values& values, int* source, int tag = 0) {
  Request request = recv(values, DPT_ANY_RANK, tag);
  request.request.source = source;
  return request;
}

inline Values numbers(size_t count, int32_t first) {
  Values values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

}  // namespace dpt::testing
