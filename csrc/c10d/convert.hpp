// Torch's tensors and enums in the core's terms.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <initializer_list>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "deepytorch.h"

namespace dpt::c10d_adapter {

// An exception's text, without the C++ frames that torch's own append to it.
std::string text_of(const std::exception& error);

// Text from pieces, without streams. Torch and this library may each carry a C++ library of their
// own. A stream that takes its locale from the other's copy crashes.
std::string join_text(std::initializer_list<std::string> pieces);
[[noreturn]] void throw_value_error(std::initializer_list<std::string> pieces);

// A ValueError with the text that follows unless `condition`; the text is built only then.
#define DPT_CHECK_VALUE(condition, ...) \
  if (!(condition)) ::dpt::c10d_adapter::throw_value_error(__VA_ARGS__)

// The contents of one buffer. Types the core doesn't know (float8, uint16, ...) are moved as bytes,
// and reduced by the delegate.
struct Elements {
  dpt_data_type dtype;
  size_t count;
};
Elements elements_of(const at::Tensor& tensor, bool reduces);
// Elements of each tensor.
std::vector<size_t> counts_of(at::TensorList tensors);

// Takes the floats that the core asks the stock backend to reduce. Throws std::invalid_argument.
at::ScalarType to_scalar_type(dpt_data_type type);

dpt_reduce_op to_reduce_op(const c10d::ReduceOp& op);
// Whether it is a mean of whole numbers on the host, which neither the core nor gloo has.
bool is_integer_mean(const c10d::ReduceOp& op, const at::Tensor& tensor);
// The factor of PREMUL_SUM; 1 for other reduce ops.
double premul_factor_of(const c10d::ReduceOp& op);

// Copies in whichever thread calls it. The program may have made `to` in inference mode, or in its
// autograd graph. The graph notices the copy as little as it does where the operation writes to the
// tensor itself.
void copy_as_made(const at::Tensor& to, const at::Tensor& from);

// Tensors as the core wants them: contiguous. Those that are not get a contiguous stand-in.
class Contiguous {
 public:
  // Nothing is ever written to an input, whose memory may be read-only or overlap itself.
  enum class Direction { kInput, kOutput, kInPlace };
  Contiguous(at::TensorList tensors, Direction direction);

  at::TensorList tensors() const { return contiguous_; }
  std::vector<void*> pointers() const;
  // After the operation: copies stand-ins back, those of outputs and in-place tensors.
  void copy_back() const;

 private:
  std::vector<at::Tensor> originals_;
  std::vector<at::Tensor> contiguous_;
  Direction direction_;
};

// Why native host code cannot take these tensors ("tensors on cuda", ...), or nothing.
std::optional<std::string> why_not_host(at::TensorList tensors);

}  // namespace dpt::c10d_adapter
