// Host reductions: N buffers into one, in rank order, with one rounding.
#pragma once

#include <cstddef>

#include "base/types.hpp"

namespace dpt {

// destination[i] = op(sources[0][i], sources[1][i], ...), evaluated left to right.
//
// Accumulates 16- and 32-bit floats in fp32, float64 in float64, integers in their own type
// (wrapping), and rounds once (to nearest even) at the end. The same inputs give the same bits on
// every rank and instruction set; a NaN propagates, also through MIN and MAX, and comes out as the
// one quiet NaN. AVG divides by num_sources or `divisor` (floats only). Bools stay 0 or 1 (SUM is
// "any"). Sources and destinations may be equal pointers, but must not overlap otherwise; no
// alignment is needed.
struct ReduceArgs {
  DataType dtype;
  ReduceOp op;
  const void* const* sources;
  int num_sources;
  const double* factors = nullptr;  // PREMUL_SUM: one per source
  int divisor = 0;                  // AVG: 0: num_sources
  size_t count = 0;                 // elements of each buffer
  void* destination = nullptr;
  void* const* copies = nullptr;  // further destinations that get the same
  int num_copies = 0;
};

// Whether `reduce` handles the pair; never depends on the machine.
bool can_reduce(DataType dtype, ReduceOp op);

// Throws Error(DPT_ERR_INVALID) for a pair that `can_reduce` refuses.
void reduce(const ReduceArgs& args);

// "avx512", "avx2" or "portable": what this machine's reductions run with.
const char* reduce_isa();
// For tests: use no wider instruction set than `isa`; returns what is used now.
const char* limit_reduce_isa(const char* isa);

}  // namespace dpt
