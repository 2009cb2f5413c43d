// The reduction loop: written once, compiled once per instruction set by reduce_<isa>.cpp.
//
// Everything is in an anonymous namespace and calls no inline function of a library. The same code
// is compiled with different -m flags, and the linker must never fold the AVX-512 copy of a
// function into the portable one. The arithmetic is that of the compiler's vector extension; only
// float16 has instructions of its own. Files that include this are compiled with -ffp-contract=off,
// because a fused multiply-add would round differently from the others.
#pragma once

#include <type_traits>

#include "host/reduce.hpp"
#include "host/reduce_formats.hpp"
#include "host/reduce_isa.hpp"

namespace dpt {
namespace {

// ---- Operations ----

struct Operation {
  static constexpr bool kScalesInputs = false;
  static constexpr bool kAverages = false;
};
struct Sum : Operation {
  template <typename V>
  static V combine(V a, V b) {
    return a + b;
  }
};
struct Average : Sum {
  static constexpr bool kAverages = true;
};
struct PremulSum : Sum {
  static constexpr bool kScalesInputs = true;
};
struct Product : Operation {
  template <typename V>
  static V combine(V a, V b) {
    return a * b;
  }
};
// A NaN on either side wins; equal values (the two zeros) keep the lower rank's.
struct Min : Operation {
  template <typename V>
  static V combine(V a, V b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};
struct Max : Operation {
  template <typename V>
  static V combine(V a, V b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};
struct BitAnd : Operation {
  template <typename V>
  static V combine(V a, V b) {
    return a & b;
  }
};
struct BitOr : Operation {
  template <typename V>
  static V combine(V a, V b) {
    return a | b;
  }
};
struct BitXor : Operation {
  template <typename V>
  static V combine(V a, V b) {
    return a ^ b;
  }
};

// ---- The loop ----

template <typename Format, typename Op>
struct Reduction {
  using Value = typename Format::Value;
  using Values = typename Format::Values;
  static constexpr size_t kBlockBytes = Format::kBlockBytes;

  static Pair<Values> load(const ReduceArgs& args, int rank, const char* block) {
    Pair<Values> values = Format::load(block);
    if constexpr (Op::kScalesInputs) {
      const Value factor = static_cast<Value>(args.factors[rank]);
      values = {values.a * factor, values.b * factor};
    }
    return values;
  }

  static Pair<Values> combine(Pair<Values> left, Pair<Values> right) {
    return {Op::combine(left.a, right.a), Op::combine(left.b, right.b)};
  }

  static void store(const ReduceArgs& args, char* block, Pair<Values> values) {
    if constexpr (Op::kAverages) {
      const Value count = static_cast<Value>(args.divisor != 0 ? args.divisor : args.num_sources);
      values = {values.a / count, values.b / count};
    }
    Format::store(block, values);
  }

  static void run(const ReduceArgs& shared_args) {
    const ReduceArgs args = shared_args;  // a copy that the stores through char* cannot change
    const auto source = [&](int rank) { return static_cast<const char*>(args.sources[rank]); };
    char* const first = static_cast<char*>(args.destination);
    // From the first destination, where the values are rounded and packed already.
    const auto copy_out = [&](size_t begin, size_t length) {
      for (int copy = 0; copy < args.num_copies; ++copy) {
        __builtin_memcpy(static_cast<char*>(args.copies[copy]) + begin, first + begin, length);
      }
    };
    const size_t bytes = args.count * sizeof(typename Format::Stored);

    size_t offset = 0;
    for (; offset + kBlockBytes <= bytes; offset += kBlockBytes) {
      Pair<Values> values = load(args, 0, source(0) + offset);
      for (int rank = 1; rank < args.num_sources; ++rank) {
        values = combine(values, load(args, rank, source(rank) + offset));
      }
      store(args, first + offset, values);
      copy_out(offset, kBlockBytes);
    }
    if (offset == bytes) return;

    // The rest through a padded block, so that there is no second, scalar arithmetic.
    alignas(kCacheLine) char block[kBlockBytes] = {};
    const size_t rest = bytes - offset;
    const auto load_rest = [&](int rank) {
      __builtin_memcpy(block, source(rank) + offset, rest);
      return load(args, rank, block);
    };
    Pair<Values> values = load_rest(0);
    for (int rank = 1; rank < args.num_sources; ++rank) values = combine(values, load_rest(rank));
    store(args, block, values);
    __builtin_memcpy(first + offset, block, rest);
    copy_out(offset, rest);
  }
};

// ---- The table ----

template <template <size_t> typename Format, size_t kVectorBytes>
ReduceKernel find_float_kernel(ReduceOp op) {
  switch (op) {
    case DPT_SUM:
      return Reduction<Format<kVectorBytes>, Sum>::run;
    case DPT_AVG:
      return Reduction<Format<kVectorBytes>, Average>::run;
    case DPT_PRODUCT:
      return Reduction<Format<kVectorBytes>, Product>::run;
    case DPT_MIN:
      return Reduction<Format<kVectorBytes>, Min>::run;
    case DPT_MAX:
      return Reduction<Format<kVectorBytes>, Max>::run;
    case DPT_PREMUL_SUM:
      return Reduction<Format<kVectorBytes>, PremulSum>::run;
    default:
      return nullptr;
  }
}

template <typename T, size_t kVectorBytes>
ReduceKernel find_integer_kernel(ReduceOp op) {
  // Only an order tells signed from unsigned, and unsigned arithmetic is what wraps.
  using Unsigned = Integer<std::make_unsigned_t<T>, kVectorBytes>;
  switch (op) {
    case DPT_SUM:
      return Reduction<Unsigned, Sum>::run;
    case DPT_PRODUCT:
      return Reduction<Unsigned, Product>::run;
    case DPT_MIN:
      return Reduction<Integer<T, kVectorBytes>, Min>::run;
    case DPT_MAX:
      return Reduction<Integer<T, kVectorBytes>, Max>::run;
    case DPT_BAND:
      return Reduction<Unsigned, BitAnd>::run;
    case DPT_BOR:
      return Reduction<Unsigned, BitOr>::run;
    case DPT_BXOR:
      return Reduction<Unsigned, BitXor>::run;
    default:
      return nullptr;
  }
}

// Bools are bytes of 0 or 1, and stay so: a sum is "any" (as NCCL has it), a product is "all".
template <size_t kVectorBytes>
ReduceKernel find_bool_kernel(ReduceOp op) {
  switch (op) {
    case DPT_SUM:
    case DPT_MAX:
    case DPT_BOR:
      return find_integer_kernel<uint8_t, kVectorBytes>(DPT_BOR);
    case DPT_PRODUCT:
    case DPT_MIN:
    case DPT_BAND:
      return find_integer_kernel<uint8_t, kVectorBytes>(DPT_BAND);
    case DPT_BXOR:
      return find_integer_kernel<uint8_t, kVectorBytes>(DPT_BXOR);
    default:
      return nullptr;
  }
}

template <size_t kVectorBytes>
ReduceKernel find_kernel(DataType dtype, ReduceOp op) {
  switch (dtype) {
    case DPT_BOOL:
      return find_bool_kernel<kVectorBytes>(op);
    case DPT_INT8:
      return find_integer_kernel<int8_t, kVectorBytes>(op);
    case DPT_UINT8:
      return find_integer_kernel<uint8_t, kVectorBytes>(op);
    case DPT_INT16:
      return find_integer_kernel<int16_t, kVectorBytes>(op);
    case DPT_INT32:
      return find_integer_kernel<int32_t, kVectorBytes>(op);
    case DPT_INT64:
      return find_integer_kernel<int64_t, kVectorBytes>(op);
    case DPT_FLOAT16:
      return find_float_kernel<Float16, kVectorBytes>(op);
    case DPT_BFLOAT16:
      return find_float_kernel<BFloat16, kVectorBytes>(op);
    case DPT_FLOAT32:
      return find_float_kernel<Float32, kVectorBytes>(op);
    case DPT_FLOAT64:
      return find_float_kernel<Float64, kVectorBytes>(op);
    default:
      return nullptr;
  }
}

}  // namespace
}  // namespace dpt
