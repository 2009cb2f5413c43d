// User memory of any alignment as 16-byte vectors (8-byte ones in low-latency kernels), and the
// arithmetic on them: ranks are added up in rank order, in float32 for the 16-bit types, and
// rounded once. So all ranks get the same bits, every time.
#pragma once

#include <type_traits>

#include "cuda/device.cuh"

namespace dpt::cuda {

template <int kWords>
struct alignas(4 * kWords) Words {
  uint32_t word[kWords];
  static constexpr int kBytes = 4 * kWords;
};
using Vector = Words<4>;
using Half = Words<2>;

DPT_DEVICE Vector to_vector(uint4 v) { return {{v.x, v.y, v.z, v.w}}; }
DPT_DEVICE uint4 to_uint4(const Vector& v) { return {v.word[0], v.word[1], v.word[2], v.word[3]}; }

// Word by word: a choice between two objects would be one between their addresses, and so put both
// into memory.
DPT_DEVICE Vector pick(bool first, const Vector& a, const Vector& b) {
  Vector picked;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t one = a.word[i];
    const uint32_t other = b.word[i];
    picked.word[i] = first ? one : other;
  }
  return picked;
}

DPT_DEVICE uint64_t address_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// Slow ways, out of line: they would be most of every kernel and are hardly ever taken. They use
// the largest unit, 1 to 4 bytes, that address and length allow.
template <typename Unit, typename V>
DPT_DEVICE void load_units(const char* from, int bytes, V* vector) {
  constexpr int kSize = sizeof(Unit);
  for (int at = 0; at < bytes; at += kSize) {
    const uint32_t unit = *reinterpret_cast<const Unit*>(from + at);
    vector->word[at / 4] |= unit << 8 * (at % 4);
  }
}
template <typename Unit, typename V>
DPT_DEVICE void store_units(char* to, int bytes, const V& vector) {
  constexpr int kSize = sizeof(Unit);
  for (int at = 0; at < bytes; at += kSize) {
    *reinterpret_cast<Unit*>(to + at) = static_cast<Unit>(vector.word[at / 4] >> 8 * (at % 4));
  }
}
DPT_DEVICE bool allows(uint64_t unit, uint64_t address, int bytes) {
  return address % unit == 0 && static_cast<uint64_t>(bytes) % unit == 0;
}
template <typename V>
DPT_DEVICE_CALL V load_slowly(const char* from, int bytes) {
  V vector{};
  if (allows(4, address_of(from), bytes)) {
    load_units<uint32_t>(from, bytes, &vector);
  } else if (allows(2, address_of(from), bytes)) {
    load_units<uint16_t>(from, bytes, &vector);
  } else {
    load_units<uint8_t>(from, bytes, &vector);
  }
  return vector;
}
template <typename V>
DPT_DEVICE_CALL void store_slowly(char* to, V vector, int bytes) {
  if (allows(4, address_of(to), bytes)) {
    store_units<uint32_t>(to, bytes, vector);
  } else if (allows(2, address_of(to), bytes)) {
    store_units<uint16_t>(to, bytes, vector);
  } else {
    store_units<uint8_t>(to, bytes, vector);
  }
}

// `valid` bytes from `from` on are the caller's, of which a vector takes what it holds; the rest of
// it is zero.
template <typename V>
DPT_DEVICE V load_user(const char* from, uint64_t valid) {
  if (valid >= V::kBytes && address_of(from) % V::kBytes == 0) {
    return *reinterpret_cast<const V*>(from);
  }
  return load_slowly<V>(from, valid < V::kBytes ? static_cast<int>(valid) : V::kBytes);
}
template <typename V>
DPT_DEVICE void store_user(char* to, const V& vector, uint64_t valid) {
  if (valid >= V::kBytes && address_of(to) % V::kBytes == 0) {
    *reinterpret_cast<V*>(to) = vector;
  } else {
    store_slowly(to, vector, valid < V::kBytes ? static_cast<int>(valid) : V::kBytes);
  }
}

// Sums of T are kept in this type.
template <typename T>
struct AccumulatorOf {
  using type = T;
};
template <>
struct AccumulatorOf<__half> {
  using type = float;
};
template <>
struct AccumulatorOf<__nv_bfloat16> {
  using type = float;
};

template <typename T>
DPT_DEVICE typename AccumulatorOf<T>::type widen(T value) {
  return value;
}
template <>
DPT_DEVICE float widen(__half value) {
  return __half2float(value);
}
template <>
DPT_DEVICE float widen(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
template <typename T>
DPT_DEVICE T narrow(typename AccumulatorOf<T>::type value) {
  return value;
}
template <>
DPT_DEVICE __half narrow(float value) {
  return __float2half(value);
}
template <>
DPT_DEVICE __nv_bfloat16 narrow(float value) {
  return __float2bfloat16(value);
}

struct Sum {
  template <typename A>
  DPT_DEVICE static A apply(A a, A b) {
    return a + b;
  }
};
// As torch does it: a NaN on any rank is the result.
struct Min {
  template <typename A>
  DPT_DEVICE static A apply(A a, A b) {
    return b < a || b != b ? b : a;
  }
};
struct Max {
  template <typename A>
  DPT_DEVICE static A apply(A a, A b) {
    return b > a || b != b ? b : a;
  }
};

// Factors around a sum: each rank's own of its input (premul_sum) and one of the result (avg).
struct Scale {
  double input = 1;
  double result = 1;
};

// One vector of T from each rank, reduced in rank order.
template <typename T, typename Op, typename V>
class Reducer {
 public:
  using Accumulator = typename AccumulatorOf<T>::type;
  static constexpr int kElements = V::kBytes / sizeof(T);

  // This rank's input as the others get it.
  DPT_DEVICE static V scale_input(const V& input, const Scale& scale) {
    return scale.input == 1 ? input : scaled(input, scale.input);
  }

  DPT_DEVICE void add(const V& vector) {
    T elements[kElements];
    unpack(vector, elements);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const Accumulator value = widen<T>(elements[i]);
      sum_[i] = first_ ? value : Op::apply(sum_[i], value);
    }
    first_ = false;
  }

  DPT_DEVICE V result(const Scale& scale) const {
    T elements[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const bool plain = scale.result == 1;
      elements[i] = narrow<T>(plain ? sum_[i] : sum_[i] * static_cast<Accumulator>(scale.result));
    }
    return pack(elements);
  }

 private:
  DPT_DEVICE_CALL static V scaled(V vector, double factor) {
    T elements[kElements];
    unpack(vector, elements);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      elements[i] = narrow<T>(widen<T>(elements[i]) * static_cast<Accumulator>(factor));
    }
    return pack(elements);
  }
  DPT_DEVICE static void unpack(const V& vector, T* elements) {
    memcpy(static_cast<void*>(elements), &vector, sizeof vector);
  }
  DPT_DEVICE static V pack(const T* elements) {
    V vector;
    memcpy(&vector, elements, sizeof vector);
    return vector;
  }

  Accumulator sum_[kElements] = {};
  bool first_ = true;
};

}  // namespace dpt::cuda
