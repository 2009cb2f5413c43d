// CRC-32C (Castagnoli, RFC 3720): the checksum of messages between nodes, where it is asked for. It
// stays our own: no library in the build has it, and the processor does the work.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dpt {

// The checksum of `bytes` at `data`, after bytes whose checksum is `before`. Uses the CPU's own
// instruction if it has one (x86 with SSE 4.2), else tables.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);

// The way by tables, for tests.
uint32_t crc32c_by_tables(const void* data, size_t bytes, uint32_t before = 0);

}  // namespace dpt
