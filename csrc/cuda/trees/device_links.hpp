// The links between the GPUs of a group, put together from what each of its ranks sees of them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/trees/trees.hpp"

namespace dpt {

// One rank's link to another's GPU: LinkMatrix::kNone, kPcie, a number of NVLinks, or one of these,
// which say less and so are greater.
enum LinkSeen : int8_t {
  kNvlinksUncounted = LinkMatrix::kMost + 1,
  kSameGpu,
  kUnseen,  // containers may hide GPUs of others
};

// To every rank of the group.
struct LinksSeen {
  std::array<int8_t, cuda::kMaxRanks> to;
};

// One for each rank, of at most kMaxRanks. What one rank doesn't see another may, and of two that
// see different links the worse is believed. Where the NVLinks of any two ranks are not counted,
// NVLinks are all alike. So are ranks that share a GPU to the best linked of the others.
LinkMatrix links_between(const std::vector<LinksSeen>& ranks);

// The link between two global ranks that DEEPYTORCH_EMULATE_LINKS gives; nothing if that is empty.
// Throws Error(DPT_ERR_INVALID) if it is malformed or has no such ranks.
std::optional<int8_t> emulated_link(const std::string& text, int64_t from, int64_t to);

cuda::Wiring wiring_of(const LinkMatrix& links);
// Ranks that `rank` shares memory with, as bits.
uint32_t neighbours_of(const LinkMatrix& links, int rank);

}  // namespace dpt
