// Reductions past the caches, against reductions in them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "base/error.hpp"
#include "host/reduce_for_device.hpp"

namespace dpt::testing {
namespace {

constexpr size_t kAlignment = 64;
constexpr char kUntouched = 0x5a;

// Bytes on a boundary, `shift` behind it.
class Buffer {
 public:
  Buffer(size_t bytes, size_t shift, char value) : bytes_(bytes + shift + kAlignment, value) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    begin_ = bytes_.data() + (kAlignment - address % kAlignment) % kAlignment + shift;
  }
  char* begin() { return begin_; }

 private:
  std::vector<char> bytes_;
  char* begin_;
};

class ReduceForDevice : public ::testing::TestWithParam<std::tuple<DataType, size_t>> {};

TEST_P(ReduceForDevice, GivesTheSameBits) {
  const auto [dtype, count] = GetParam();
  constexpr int kSources = 3;
  const double factors[kSources] = {0.5, 3.0, -1.25};
  const size_t bytes = count * size_of(dtype);
  std::mt19937 random(static_cast<unsigned>(count));
  std::vector<Buffer> inputs;
  std::vector<const void*> sources;
  for (int i = 0; i < kSources; ++i) inputs.emplace_back(bytes, 0, 0);
  for (Buffer& input : inputs) {
    for (size_t at = 0; at < bytes; ++at) {
      // Bools are 0 or 1.
      input.begin()[at] = static_cast<char>(dtype == DPT_BOOL ? random() & 1 : random());
    }
    sources.push_back(input.begin());
  }
  for (const ReduceOp op : {DPT_SUM, DPT_AVG, DPT_MAX, DPT_PREMUL_SUM, DPT_BXOR}) {
    if (!can_reduce(dtype, op)) continue;
    Buffer expected(bytes + 1, 0, kUntouched);
    Buffer found(bytes + 1, 0, kUntouched);
    ReduceArgs args{.dtype = dtype,
                    .op = op,
                    .sources = sources.data(),
                    .num_sources = kSources,
                    .factors = op == DPT_PREMUL_SUM ? factors : nullptr,
                    .count = count};
    args.destination = expected.begin();
    reduce(args);
    args.destination = found.begin();
    reduce_for_device(args);
    EXPECT_EQ(std::memcmp(found.begin(), expected.begin(), bytes + 1), 0) << name_of(op);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Types,
    ReduceForDevice,
    ::testing::Combine(
        ::testing::Values(
            DPT_FLOAT32, DPT_BFLOAT16, DPT_FLOAT16, DPT_FLOAT64, DPT_INT8, DPT_INT64, DPT_BOOL),
        // None, one, around a block of 4 KiB of each size, many with a rest.
        ::testing::Values(0, 1, 7, 511, 1024, 2049, 4096, 4099, 100'003)));

TEST(ReduceForDeviceArguments, RefusesWhatItCouldNotStream) {
  Buffer input(64, 0, 1);
  Buffer output(64, 1, 0);
  const void* source = input.begin();
  const ReduceArgs args{.dtype = DPT_FLOAT32,
                        .op = DPT_SUM,
                        .sources = &source,
                        .num_sources = 1,
                        .count = 8,
                        .destination = output.begin()};
  EXPECT_THROW(reduce_for_device(args), Error);
}

}  // namespace
}  // namespace dpt::testing
