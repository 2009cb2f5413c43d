// The format of a data socket: stripes of numbered messages, each behind a header.
//
// NOTE [Striping] Messages between two ranks are numbered in the order in which they were posted. A
// message is cut into stripes, and whichever socket has room takes the next one. So a flow that is
// slow, or capped, carries less, and the sum of all is used.
//
// NOTE [Parking] A peer may send message k+1 on socket B while A still carries message k. The
// header says which message a stripe belongs to; a socket whose message this rank has not asked for
// yet is not read any further until it has. So nothing overtakes and nothing is buffered without
// bound.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace dpt {

struct StripeHeader {
  static constexpr uint32_t kMagic = 0x53545044;  // "DPTS"

  uint32_t magic;
  uint32_t bytes;    // of this stripe, which follow
  uint64_t message;  // its number
  uint64_t offset;   // of this stripe in it
  uint64_t total;    // bytes of the message
  uint32_t checked;  // 1: `checksum` says what it is, 0: there is none
  uint32_t checksum;
};
static_assert(sizeof(StripeHeader) == 40);

// NOTE [Checksums] A stripe's checksum covers its header too, with 0 in place of itself. Each side
// decides for what it sends, and whoever receives a checksum compares it: ranks need not agree.
uint32_t checksum_of(StripeHeader header, const char* data);

constexpr size_t kLeastStripe = 16 << 10;
constexpr size_t kMostStripe = 256 << 10;

// Stripes so that every socket gets one where the message is long enough to be worth it.
constexpr size_t stripe_bytes_of(size_t message_bytes, size_t sockets) {
  return std::clamp((message_bytes + sockets - 1) / sockets, kLeastStripe, kMostStripe);
}

// Empty when the header can be believed, else what is wrong with it.
std::string fault_of(const StripeHeader& header);

// A word on the control socket: a beat, a farewell, or the group's end with its reason.
struct ControlHeader {
  enum Kind : uint16_t { kBeat = 1, kBye = 2, kAbort = 3 };
  static constexpr uint32_t kMagic = 0x57545044;  // "DPTW"
  static constexpr uint32_t kMostText = 480;

  uint32_t magic;
  uint16_t kind;
  uint16_t status;  // kAbort: dpt_status
  uint32_t bytes;   // of text, which follow
};
static_assert(sizeof(ControlHeader) == 12);

std::string fault_of(const ControlHeader& header);

}  // namespace dpt
