#include "elements.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace dpt::testing {
namespace {

// Rounds float to bfloat16 or float16, to nearest even; the test's own, written for clarity.
uint16_t narrow(float value, int exponent_bits, int mantissa_bits) {
  if (value == 0) return std::signbit(value) ? 0x8000 : 0;
  int exponent = 0;
  const double mantissa = std::frexp(std::fabs(static_cast<double>(value)), &exponent);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  // 1.xxx * 2^(exponent-1), kept to mantissa_bits after the point.
  auto scaled = static_cast<int64_t>(std::nearbyint(std::ldexp(mantissa, mantissa_bits + 1)));
  if (scaled >> (mantissa_bits + 1)) {
    scaled >>= 1;
    ++exponent;
  }
  const int64_t bits = (static_cast<int64_t>(exponent - 1 + bias) << mantissa_bits) +
                       (scaled - (int64_t{1} << mantissa_bits));
  return static_cast<uint16_t>(bits | (std::signbit(value) ? 0x8000 : 0));
}

float widen(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const float sign = (bits & 0x8000) ? -1.0F : 1.0F;
  if (exponent == 0 && mantissa == 0) return sign * 0.0F;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  return sign * std::ldexp(1.0F + std::ldexp(static_cast<float>(mantissa), -mantissa_bits),
                           exponent - bias);
}

template <typename T>
void store(unsigned char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

template <typename T>
T load(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

bool is_float(DataType dtype) {
  return dtype == DPT_FLOAT16 || dtype == DPT_BFLOAT16 || dtype == DPT_FLOAT32 ||
         dtype == DPT_FLOAT64;
}

double combine(ReduceOp op, double a, double b) {
  switch (op) {
    case DPT_SUM:
    case DPT_AVG:
    case DPT_PREMUL_SUM:
      return a + b;
    case DPT_PRODUCT:
      return a * b;
    case DPT_MIN:
      return std::min(a, b);
    case DPT_MAX:
      return std::max(a, b);
    case DPT_BAND:
      return static_cast<double>(static_cast<int64_t>(a) & static_cast<int64_t>(b));
    case DPT_BOR:
      return static_cast<double>(static_cast<int64_t>(a) | static_cast<int64_t>(b));
    case DPT_BXOR:
      return static_cast<double>(static_cast<int64_t>(a) ^ static_cast<int64_t>(b));
    case DPT_NO_REDUCE:
      break;
  }
  throw std::logic_error("not a reduction");
}

}  // namespace

Elements::Elements(DataType dtype, size_t count)
    : dtype_(dtype), count_(count), bytes_((count + kMisalignment) * size_of(dtype)) {}

void Elements::set(size_t index, double value) {
  unsigned char* at = static_cast<unsigned char*>(data()) + index * size_of(dtype_);
  switch (dtype_) {
    case DPT_BOOL:
      return store<uint8_t>(at, value != 0);
    case DPT_INT8:
      return store(at, static_cast<int8_t>(value));
    case DPT_UINT8:
      return store(at, static_cast<uint8_t>(value));
    case DPT_INT16:
      return store(at, static_cast<int16_t>(value));
    case DPT_INT32:
      return store(at, static_cast<int32_t>(value));
    case DPT_INT64:
      return store(at, static_cast<int64_t>(value));
    case DPT_FLOAT16:
      return store(at, narrow(static_cast<float>(value), 5, 10));
    case DPT_BFLOAT16:
      return store(at, narrow(static_cast<float>(value), 8, 7));
    case DPT_FLOAT32:
      return store(at, static_cast<float>(value));
    case DPT_FLOAT64:
      return store(at, value);
    case DPT_COMPLEX64:
      store(at, static_cast<float>(value));
      return store(at + 4, static_cast<float>(-value));
    case DPT_OTHER:
    case DPT_COMPLEX128:
      store(at, value);
      return store(at + 8, -value);
  }
}

double Elements::get(size_t index) const {
  const unsigned char* at = static_cast<const unsigned char*>(data()) + index * size_of(dtype_);
  switch (dtype_) {
    case DPT_BOOL:
    case DPT_UINT8:
      return load<uint8_t>(at);
    case DPT_INT8:
      return load<int8_t>(at);
    case DPT_INT16:
      return load<int16_t>(at);
    case DPT_INT32:
      return load<int32_t>(at);
    case DPT_INT64:
      return static_cast<double>(load<int64_t>(at));
    case DPT_FLOAT16:
      return widen(load<uint16_t>(at), 5, 10);
    case DPT_BFLOAT16:
      return widen(load<uint16_t>(at), 8, 7);
    case DPT_FLOAT32:
    case DPT_COMPLEX64:
      return load<float>(at);
    case DPT_FLOAT64:
    case DPT_OTHER:
    case DPT_COMPLEX128:
      return load<double>(at);
  }
  return 0;
}

void Elements::fill(int rank, int salt) {
  for (size_t i = 0; i < count_; ++i) {
    const auto mixed = static_cast<int>((i * 7 + i / 64 + rank * 5 + salt * 3) % 5);
    if (dtype_ == DPT_BOOL) {
      set(i, mixed % 2);
    } else if (dtype_ == DPT_UINT8) {
      set(i, mixed);
    } else if (is_float(dtype_)) {
      set(i, (mixed - 2) / 2.0);
    } else {
      set(i, mixed - 2);
    }
  }
}

bool Elements::operator==(const Elements& other) const {
  return dtype_ == other.dtype_ && count_ == other.count_ &&
         (count_ == 0 || std::memcmp(data(), other.data(), count_ * size_of(dtype_)) == 0);
}

Elements reference_reduce(ReduceOp op,
                          const std::vector<Elements>& inputs,
                          const std::vector<double>& factors) {
  Elements result(inputs[0].dtype(), inputs[0].count());
  for (size_t i = 0; i < result.count(); ++i) {
    double value = 0;
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      double next = inputs[rank].get(i);
      if (op == DPT_PREMUL_SUM) next *= factors[rank];
      value = rank == 0 ? next : combine(op, value, next);
    }
    if (op == DPT_AVG) {
      // The one inexact step: a quotient in the accumulator's precision, then one rounding.
      const auto size = static_cast<double>(inputs.size());
      value = result.dtype() == DPT_FLOAT64 ? value / size
                                            : static_cast<float>(value) / static_cast<float>(size);
    }
    result.set(i, value);
  }
  return result;
}

}  // namespace dpt::testing
