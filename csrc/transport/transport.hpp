// Transports, in order of preference: the first that reaches every rank of a group carries its
// native collectives. Adding one is one folder and one line in registry.cpp.
#pragma once

#include <string>
#include <vector>

#include "bootstrap/exchange.hpp"

namespace dpt {

struct Transport {
  const char* name;
  // Empty when every rank can reach every other, else the reason why not, naming ranks. Pure: all
  // ranks call it with the same peers and get the same answer.
  std::string (*why_not)(const std::vector<PeerInfo>& peers,
                         const std::vector<int64_t>& global_ranks);
};

struct TransportChoice {
  const Transport* transport = nullptr;  // nullptr: none fits, see why_not
  std::string why_not;
};

TransportChoice choose_transport(const std::vector<PeerInfo>& peers,
                                 const std::vector<int64_t>& global_ranks);

}  // namespace dpt
