#include "transport/tcp/framing.hpp"

#include "transport/tcp/crc32c.hpp"

namespace dpt {

uint32_t checksum_of(StripeHeader header, const char* data) {
  header.checksum = 0;
  return crc32c(data, header.bytes, crc32c(&header, sizeof header));
}

std::string fault_of(const StripeHeader& header) {
  if (header.magic != StripeHeader::kMagic) return "bytes that are no stripe";
  if (header.bytes > kMostStripe) return "a stripe of " + std::to_string(header.bytes) + " bytes";
  if (header.offset > header.total || header.bytes > header.total - header.offset) {
    return "a stripe past the end of its message";
  }
  if (header.bytes == 0 && header.total != 0) return "an empty stripe";
  if (header.checked > 1) return "a stripe of another version";
  return "";
}

std::string fault_of(const ControlHeader& header) {
  if (header.magic != ControlHeader::kMagic) return "bytes that are no control word";
  if (header.bytes > ControlHeader::kMostText) return "a control word that is too long";
  if (header.kind < ControlHeader::kBeat || header.kind > ControlHeader::kAbort) {
    return "an unknown control word";
  }
  return "";
}

}  // namespace dpt
