#include "transport/tcp/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace dpt {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // with its bits reversed
constexpr size_t kSlices = 8;                 // bytes taken at a time
using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t slice = 1; slice < kSlices; ++slice) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[slice - 1][byte];
      tables[slice][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(const void* data,
                                                          size_t bytes,
                                                          uint32_t before) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint64_t crc = ~before;
  for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t), at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    crc = _mm_crc32_u64(crc, word);
  }
  auto rest = static_cast<uint32_t>(crc);
  for (; bytes > 0; --bytes) rest = _mm_crc32_u8(rest, *at++);
  return ~rest;
}
#endif

}  // namespace

uint32_t crc32c_by_tables(const void* data, size_t bytes, uint32_t before) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint32_t crc = ~before;
  for (; bytes >= kSlices; bytes -= kSlices, at += kSlices) {
    uint32_t next = 0;
    for (size_t i = 0; i < kSlices; ++i) {
      const uint32_t byte = i < 4 ? at[i] ^ ((crc >> (8 * i)) & 0xff) : at[i];
      next ^= kTables[kSlices - 1 - i][byte];
    }
    crc = next;
  }
  for (; bytes > 0; --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *at++) & 0xff];
  return ~crc;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return by_instruction(data, bytes, before);
#endif
  return crc32c_by_tables(data, bytes, before);
}

}  // namespace dpt
