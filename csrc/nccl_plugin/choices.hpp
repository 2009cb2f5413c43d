// The table that the plugin goes by: what was measured to be fastest, by collective, size and
// place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dpt::nccl_plugin {

struct Choice {
  int function = 0;         // NCCL's number of the collective
  int64_t first_bytes = 0;  // sizes as NCCL counts them: the larger of what a rank gives and gets
  int64_t last_bytes = 0;   // inclusive
  int64_t nodes = 0;        // 0: any number
  int64_t ranks = 0;        // of the communicator; 0: any number
  int algorithm = 0;        // NCCL's number
  int protocol = 0;         // NCCL's number
  int channels = 0;         // 0: NCCL's choice
};

// Reads JSON: {"version": 1, "choices": [{"collective": "all_reduce", "first_bytes": 0,
// "last_bytes": 1048576, "nodes": 2, "ranks": 4, "algorithm": "tree", "protocol": "simple",
// "channels": 0}, ...]}. Throws Error(DPT_ERR_INVALID) that names the wrong entry and field.
std::vector<Choice> parse_choices(const std::string& text);

// The first choice for this operation of a communicator; nullptr when there is none.
const Choice* find_choice(const std::vector<Choice>& choices, int function, size_t num_bytes);

// Those that apply to a communicator of this size, in order.
std::vector<Choice> choices_for(const std::vector<Choice>& choices, size_t nodes, size_t ranks);

}  // namespace dpt::nccl_plugin
