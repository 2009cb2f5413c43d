#include "convert.hpp"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <stdexcept>

namespace dpt::c10d_adapter {
namespace {

std::optional<dpt_data_type> to_data_type(at::ScalarType type) {
  switch (type) {
    case at::kBool:
      return DPT_BOOL;
    case at::kChar:
      return DPT_INT8;
    case at::kByte:
      return DPT_UINT8;
    case at::kShort:
      return DPT_INT16;
    case at::kInt:
      return DPT_INT32;
    case at::kLong:
      return DPT_INT64;
    case at::kHalf:
      return DPT_FLOAT16;
    case at::kBFloat16:
      return DPT_BFLOAT16;
    case at::kFloat:
      return DPT_FLOAT32;
    case at::kDouble:
      return DPT_FLOAT64;
    case at::kComplexFloat:
      return DPT_COMPLEX64;
    case at::kComplexDouble:
      return DPT_COMPLEX128;
    default:
      return std::nullopt;
  }
}

}  // namespace

std::vector<size_t> counts_of(at::TensorList tensors) {
  std::vector<size_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(elements_of(tensor, false).count);
  return counts;
}

at::ScalarType to_scalar_type(dpt_data_type type) {
  switch (type) {
    case DPT_FLOAT16:
      return at::kHalf;
    case DPT_BFLOAT16:
      return at::kBFloat16;
    case DPT_FLOAT32:
      return at::kFloat;
    default:
      throw std::invalid_argument("the core asks for floats of 16 and 32 bits, and nothing else");
  }
}

std::string text_of(const std::exception& error) {
  const auto* own = dynamic_cast<const c10::Error*>(&error);
  return own == nullptr ? error.what() : own->what_without_backtrace();
}

std::string join_text(std::initializer_list<std::string> pieces) {
  std::string text;
  for (const std::string& piece : pieces) text += piece;
  return text;
}

void throw_value_error(std::initializer_list<std::string> pieces) {
  C10_THROW_ERROR(ValueError, "deepytorch: " + join_text(pieces));
}

[[gnu::hot]] Elements elements_of(const at::Tensor& tensor, bool reduces) {
  const auto count = static_cast<size_t>(tensor.numel());
  if (const auto dtype = to_data_type(tensor.scalar_type())) return {*dtype, count};
  return {reduces ? DPT_OTHER : DPT_UINT8, count * tensor.element_size()};
}

[[gnu::hot]] dpt_reduce_op to_reduce_op(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return DPT_SUM;
    case c10d::ReduceOp::AVG:
      return DPT_AVG;
    case c10d::ReduceOp::PRODUCT:
      return DPT_PRODUCT;
    case c10d::ReduceOp::MIN:
      return DPT_MIN;
    case c10d::ReduceOp::MAX:
      return DPT_MAX;
    case c10d::ReduceOp::PREMUL_SUM:
      return DPT_PREMUL_SUM;
    case c10d::ReduceOp::BAND:
      return DPT_BAND;
    case c10d::ReduceOp::BOR:
      return DPT_BOR;
    case c10d::ReduceOp::BXOR:
      return DPT_BXOR;
    default:
      C10_THROW_ERROR(ValueError, "deepytorch: unknown reduce op");
  }
}

[[gnu::hot]] bool is_integer_mean(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  return op.op_ == c10d::ReduceOp::AVG && tensor.device().is_cpu() &&
         at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
}

[[gnu::hot]] double premul_factor_of(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return 1;
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  DPT_CHECK_VALUE(supplement != nullptr, {"PREMUL_SUM without its factor"});
  if (supplement->tensor_factor.defined()) return supplement->tensor_factor.item<double>();
  return supplement->double_factor;
}

void copy_as_made(const at::Tensor& to, const at::Tensor& from) {
  const c10::InferenceMode as_made(to.is_inference());
  const at::NoGradGuard no_grad;  // later than the other, which may turn gradients on
  to.variable_data().copy_(from);
}

Contiguous::Contiguous(at::TensorList tensors, Direction direction)
    : originals_(tensors.vec()), direction_(direction) {
  contiguous_.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    // A lazily conjugated or negated tensor has other values in memory than it stands for.
    if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
      contiguous_.push_back(tensor);
      continue;
    }
    contiguous_.push_back(direction == Direction::kOutput
                              ? at::empty(tensor.sizes(), tensor.options())
                              : tensor.detach().clone(at::MemoryFormat::Contiguous));
  }
}

std::vector<void*> Contiguous::pointers() const {
  std::vector<void*> pointers;
  pointers.reserve(contiguous_.size());
  for (const at::Tensor& tensor : contiguous_) pointers.push_back(tensor.data_ptr());
  return pointers;
}

void Contiguous::copy_back() const {
  if (direction_ == Direction::kInput) return;
  for (size_t i = 0; i < originals_.size(); ++i) {
    if (!originals_[i].is_same(contiguous_[i])) copy_as_made(originals_[i], contiguous_[i]);
  }
}

std::optional<std::string> why_not_host(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.device().is_cpu()) {
      return "tensors on " + c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true);
    }
    if (tensor.layout() != at::kStrided) return "sparse tensors";
    if (tensor.is_quantized()) return "quantized tensors";
  }
  return std::nullopt;
}

}  // namespace dpt::c10d_adapter
