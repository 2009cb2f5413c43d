#include "host/reduce.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <string>

#include "base/error.hpp"
#include "host/reduce_isa.hpp"

namespace dpt {
namespace {

struct Isa {
  const char* name;
  ReduceKernel (*find_kernel)(DataType dtype, ReduceOp op);
  bool (*is_supported)();
};

#if defined(__x86_64__)
// Some compilers, clang 14 for one, don't know the name for __builtin_cpu_supports.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

// From the narrowest to the widest.
constexpr std::array kIsas = {
    Isa{"portable", find_portable_kernel, [] { return true; }},
#if defined(__x86_64__)
    Isa{"avx2", find_avx2_kernel, [] { return __builtin_cpu_supports("avx2") && has_f16c(); }},
    Isa{"avx512",
        find_avx512_kernel,
        [] {
          return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        }},
#endif
};

size_t widest_supported(size_t at_most) {
  while (!kIsas[at_most].is_supported()) --at_most;
  return at_most;
}

std::atomic<size_t>& isa_in_use() {
  static std::atomic<size_t> index{widest_supported(kIsas.size() - 1)};
  return index;
}

const Isa& current_isa() { return kIsas[isa_in_use().load(std::memory_order_relaxed)]; }

}  // namespace

bool can_reduce(DataType dtype, ReduceOp op) { return find_portable_kernel(dtype, op) != nullptr; }

void reduce(const ReduceArgs& args) {
  const ReduceKernel kernel = current_isa().find_kernel(args.dtype, args.op);
  if (kernel == nullptr) {
    throw Error(DPT_ERR_INVALID,
                std::string("no native ") + name_of(args.op) + " of " + name_of(args.dtype) +
                    "; ask can_reduce() first");
  }
  if (args.num_sources < 1) throw Error(DPT_ERR_INVALID, "reduce needs at least one source");
  if (args.op == DPT_PREMUL_SUM && args.factors == nullptr) {
    throw Error(DPT_ERR_INVALID, "premul_sum needs one factor per source");
  }
  kernel(args);
}

const char* reduce_isa() { return current_isa().name; }

const char* limit_reduce_isa(const char* isa) {
  const auto limit = std::find_if(
      kIsas.begin(), kIsas.end(), [&](const Isa& known) { return std::string(isa) == known.name; });
  if (limit == kIsas.end()) {
    std::string message = std::string("no instruction set \"") + isa + "\" here; known:";
    for (const Isa& known : kIsas) message += std::string(" ") + known.name;
    throw Error(DPT_ERR_INVALID, message);
  }
  isa_in_use().store(widest_supported(limit - kIsas.begin()), std::memory_order_relaxed);
  return reduce_isa();
}

}  // namespace dpt
