// Buffers of any data type as doubles, and the scalar reference that collectives are compared with.
//
// Test values are small integers and halves: exact in every type, also after reductions, so that
// results are compared bit by bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.hpp"

namespace dpt::testing {

class Elements {
 public:
  Elements(DataType dtype, size_t count);

  DataType dtype() const { return dtype_; }
  size_t count() const { return count_; }
  void* data() { return bytes_.data() + kMisalignment * size_of(dtype_); }
  const void* data() const { return bytes_.data() + kMisalignment * size_of(dtype_); }

  void set(size_t index, double value);
  double get(size_t index) const;
  // Fills this as a test's input number `salt` of rank `rank`.
  void fill(int rank, int salt = 0);
  bool operator==(const Elements& other) const;

 private:
  // Data begins off any vector's alignment.
  static constexpr size_t kMisalignment = 1;

  DataType dtype_;
  size_t count_;
  std::vector<unsigned char> bytes_;
};

// The reduction of `inputs`, element by element in rank order. `factors` with DPT_PREMUL_SUM.
Elements reference_reduce(ReduceOp op,
                          const std::vector<Elements>& inputs,
                          const std::vector<double>& factors = {});

}  // namespace dpt::testing
