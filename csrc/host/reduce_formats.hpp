// Formats: how a dtype lies in memory, and what it is computed in.
//
// A format loads one block into two vectors of values and stores them back. What lies where in the
// two vectors is its own affair, because every operation is elementwise. Stores round to nearest
// even and give every NaN the same bits. Otherwise the bits would depend on the compiler: an
// addition keeps one of two NaNs by the order in which its operands are placed.
//
// Part of reduce_kernels.hpp, whose rules on linkage and on library functions hold here too.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace dpt {
namespace {

template <typename T, size_t kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <typename T, size_t kBytes>
using Vector = typename VectorOf<T, kBytes>::type;

// The same bits as another type; std::bit_cast may be emitted as a function shared between files.
template <typename To, typename From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename V>
inline V load_vector(const char* from) {
  V vector;
  __builtin_memcpy(&vector, from, sizeof(V));
  return vector;
}

template <typename V>
inline void store_vector(char* to, V vector) {
  __builtin_memcpy(to, &vector, sizeof(V));
}

template <typename V>
struct Pair {
  V a;
  V b;
};

template <typename T, size_t kVectorBytes>
struct Integer {
  using Stored = T;
  using Value = T;
  using Values = Vector<T, kVectorBytes>;
  static constexpr size_t kBlockBytes = 2 * kVectorBytes;

  static Pair<Values> load(const char* block) {
    return {load_vector<Values>(block), load_vector<Values>(block + kVectorBytes)};
  }
  static void store(char* block, Pair<Values> values) {
    store_vector(block, values.a);
    store_vector(block + kVectorBytes, values.b);
  }
};

template <typename V, typename Bits>
inline V with_one_nan(V values, Bits nan) {
  return values == values ? values : bits_of<V>(nan);
}

template <typename T, typename Bits, Bits kNan, size_t kVectorBytes>
struct Float : Integer<T, kVectorBytes> {
  using Base = Integer<T, kVectorBytes>;
  using Values = typename Base::Values;
  static void store(char* block, Pair<Values> values) {
    const auto nan = Vector<Bits, kVectorBytes>{} + kNan;
    Base::store(block, {with_one_nan(values.a, nan), with_one_nan(values.b, nan)});
  }
};
template <size_t kVectorBytes>
using Float32 = Float<float, uint32_t, 0x7fc00000, kVectorBytes>;
template <size_t kVectorBytes>
using Float64 = Float<double, uint64_t, 0x7ff8000000000000, kVectorBytes>;

// 16-bit floats are computed in float32. A block is one vector of 32-bit lanes, each holding two
// elements; splitting it into the lanes' lower and upper halves needs no shuffle.
template <size_t kVectorBytes>
struct HalfWidth {
  using Stored = uint16_t;
  using Value = float;
  using Values = Vector<float, kVectorBytes>;
  using Bits = Vector<uint32_t, kVectorBytes>;
  static constexpr size_t kBlockBytes = kVectorBytes;
};

template <size_t kVectorBytes>
struct BFloat16 : HalfWidth<kVectorBytes> {
  using typename HalfWidth<kVectorBytes>::Values;
  using typename HalfWidth<kVectorBytes>::Bits;

  static Pair<Values> load(const char* block) {
    const Bits bits = load_vector<Bits>(block);
    return {bits_of<Values>(bits << 16), bits_of<Values>(bits & 0xffff0000)};
  }
  static void store(char* block, Pair<Values> values) {
    store_vector(block, rounded(values.a) >> 16 | (rounded(values.b) & 0xffff0000));
  }
  // The bfloat16 in the upper half of each lane.
  static Bits rounded(Values values) {
    const Bits bits = bits_of<Bits>(values);
    return values == values ? bits + 0x7fff + (bits >> 16 & 1) : Bits{} + 0x7fc00000;
  }
};

template <size_t kVectorBytes>
struct Float16 : HalfWidth<kVectorBytes> {
  using typename HalfWidth<kVectorBytes>::Values;
  using typename HalfWidth<kVectorBytes>::Bits;

  static Pair<Values> load(const char* block) {
    const Bits bits = load_vector<Bits>(block);
    return {widened(bits & 0xffff), widened(bits >> 16)};
  }
  static void store(char* block, Pair<Values> values) {
    store_vector(block, rounded(values.a) | rounded(values.b) << 16);
  }

  // From and to a float16 in the lower half of each lane. Comparisons are signed, which is what
  // SSE2 has.
  using Signed = Vector<int32_t, kVectorBytes>;
  static Values widened(Bits half) {
    const Signed magnitude = bits_of<Signed>(half & 0x7fff);
    const Signed normal = (magnitude << 13) + ((127 - 15) << 23);
    // Through an integer, because a float32 subnormal might be flushed to zero.
    const Values subnormal = __builtin_convertvector(magnitude, Values) * 0x1p-24f;
    Signed bits = magnitude < 0x400 ? bits_of<Signed>(subnormal) : normal;
    bits |= (magnitude >= 0x7c00) & 0x7f800000;  // infinity and NaN
    return bits_of<Values>(bits_of<Bits>(bits) | (half & 0x8000) << 16);
  }
  static Bits rounded(Values values) {
    const Bits bits = bits_of<Bits>(values);
    const Signed magnitude = bits_of<Signed>(bits & 0x7fffffff);
    // Below 2^-14 the last bit of a float16 is 2^-24: adding 0.5 makes the float32 adder round
    // there. Above, round the integer: a carry moves into the exponent and up to infinity.
    const Values half = Values{} + 0.5f;
    const Signed subnormal =
        bits_of<Signed>(bits_of<Values>(magnitude) + half) - bits_of<Signed>(half);
    const Signed normal = (magnitude - ((127 - 15) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    Signed result = magnitude < 0x38800000 ? subnormal : normal;
    result = magnitude < 0x47800000 ? result : Signed{} + 0x7c00;   // 65536 and more
    result = magnitude <= 0x7f800000 ? result : Signed{} + 0x7e00;  // NaN
    const Bits sign = bits >> 16 & 0x8000;
    return bits_of<Bits>(result) | (values == values ? sign : Bits{});
  }
};

// Processors that convert take these: the first half of the block and the second.
#if defined(__F16C__) && defined(__AVX2__)
template <>
struct Float16<32> : HalfWidth<32> {
  static Pair<Values> load(const char* block) {
    return {bits_of<Values>(_mm256_cvtph_ps(load_vector<__m128i>(block))),
            bits_of<Values>(_mm256_cvtph_ps(load_vector<__m128i>(block + 16)))};
  }
  static void store(char* block, Pair<Values> values) {
    store_vector(block, rounded(values.a));
    store_vector(block + 16, rounded(values.b));
  }
  static __m128i rounded(Values values) {
    const Values clean = with_one_nan(values, Bits{} + 0x7fc00000);
    return _mm256_cvtps_ph(bits_of<__m256>(clean), _MM_FROUND_TO_NEAREST_INT);
  }
};
#endif
#if defined(__AVX512F__)
// The masked intrinsics, because the others set off -Wmaybe-uninitialized in GCC 12's header.
template <>
struct Float16<64> : HalfWidth<64> {
  static constexpr __mmask16 kAll = 0xffff;
  static Pair<Values> load(const char* block) {
    return {bits_of<Values>(_mm512_maskz_cvtph_ps(kAll, load_vector<__m256i>(block))),
            bits_of<Values>(_mm512_maskz_cvtph_ps(kAll, load_vector<__m256i>(block + 32)))};
  }
  static void store(char* block, Pair<Values> values) {
    store_vector(block, rounded(values.a));
    store_vector(block + 32, rounded(values.b));
  }
  static __m256i rounded(Values values) {
    const Values clean = with_one_nan(values, Bits{} + 0x7fc00000);
    return _mm512_maskz_cvtps_ph(kAll, bits_of<__m512>(clean), _MM_FROUND_TO_NEAREST_INT);
  }
};
#endif

}  // namespace
}  // namespace dpt
