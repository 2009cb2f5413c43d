// The kernel that goes along spanning trees, beside those of cuda/arguments.hpp.
#pragma once

#include "cuda/arguments.hpp"
#include "cuda/trees/trees.hpp"

namespace dpt::cuda {

struct TreeArguments {
  const char* input;
  char* output;
  uint64_t bytes;
  double input_factor;
  double result_factor;
  Trees trees;
};

// Starts one kernel and returns.
void tree_all_reduce(const Launch& launch,
                     const TreeArguments& arguments,
                     DataType dtype,
                     ReduceOp op);

}  // namespace dpt::cuda
