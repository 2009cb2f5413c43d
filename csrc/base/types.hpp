// The vocabulary every layer shares: data types, reduce operations, collectives and raw buffers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "deepytorch.h"

namespace dpt {

// The C ABI's enums are the one definition; inside the core they carry these names.
using DataType = dpt_data_type;
using ReduceOp = dpt_reduce_op;
using Collective = dpt_collective;

// Bytes of one element; 0 for a value outside the enum.
size_t size_of(DataType dtype);
const char* name_of(DataType dtype);
const char* name_of(ReduceOp op);
const char* name_of(Collective collective);

constexpr size_t kCacheLine = 64;

constexpr size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace dpt
