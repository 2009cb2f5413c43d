// Code that bytes from outside reach first, as functions of those bytes alone.
//
// Each returns 0 and ends, whatever comes in. The code under test may throw dpt::Error of the
// documented status and nothing else. Input that it accepts must survive being written and read
// again. Anything else aborts the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace dpt::fuzz {

int json(const uint8_t* data, size_t size);
int profile(const uint8_t* data, size_t size);
int topology(const uint8_t* data, size_t size);
// Data sockets of a connection between nodes: what a peer that knows the secret may send.
int framing(const uint8_t* data, size_t size);
// Its control socket.
int control(const uint8_t* data, size_t size);
// Both sides of the greeting: what strangers may send.
int handshake(const uint8_t* data, size_t size);

using Target = int (*)(const uint8_t*, size_t);
const std::vector<std::pair<std::string, Target>>& targets();

}  // namespace dpt::fuzz
