// The choice of a plan for an operation on the device: a pure function of facts that are the same
// on every rank.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/types.hpp"
#include "cuda/layout.hpp"
#include "cuda/plan.hpp"
#include "tuner/choose.hpp"

namespace dpt {

struct ChooseDeviceRequest {
  Collective collective;
  size_t bytes;         // of one part, see dpt_request; the largest, where ranks know all
  bool even = true;     // all parts have `bytes`
  bool large = true;    // there are kernels for it that take any size
  cuda::Layout layout;  // of the group
  cuda::Wiring wiring = cuda::Wiring::kAlike;  // its as well
  std::string not_native;      // not empty: why native code can't serve the request or the group
  int ranks = 0;               // of the group, where it spans nodes
  int nodes = 1;               // of which the delegate can go through in stages; 1: it can't
  bool delegate = false;       // it competes: it keeps what nothing else is known to do faster
  cuda::Staging staging = {};  // of a group without peer access, which has no kernels
  bool devices_add = false;    // of such a group: staged::Job::adds_on_device
  bool divisible = false;      // of such a group: can_be_divided
  cuda::Staging copies = {};   // how copy engines serve a group that has kernels
  bool replayed = false;       // a graph is captured, which would repeat the same chunks' numbers
  const Decision* tuned = nullptr;  // for this collective and size; nullptr: the rule of thumb
};

// How many channels the kernels of one more group may have when those of the others may have `used`
// in all. Kernels of several groups may wait for peers at the same time, each with its own partner,
// and in different orders; they must all find room on the device. `wanted`: by the user; 0: any.
int offer_channels(int num_sms, int used, int wanted = 0);

// Empty, or why a group of that wiring has no kernel for the collective at any size. `large`: see
// ChooseDeviceRequest.
std::string why_not_wired(cuda::Wiring wiring, Collective collective, bool large);

// Whether the delegate may carry out an even operation in stages, within nodes and between them.
// The rule decides if the delegate does not compete. Otherwise stages must have been measured to be
// faster. `bytes`: of one part.
bool goes_by_nodes(Collective collective, size_t bytes, int ranks);

// From so many bytes in all fewer bytes between nodes count for more than the stages' latency.
inline constexpr size_t kStagedBytes = 4 << 20;

// On the device the delegate in stages is a candidate beside the delegate itself.
bool is_in_stages(const Candidate& candidate);

DevicePlan choose_device(const ChooseDeviceRequest& request);

// The plans worth trying for an even request, without the delegate. First comes the rule of
// thumb's, then smaller grids, which leave more of the device to others. At most
// kMostDeviceCandidates.
constexpr size_t kMostDeviceCandidates = 14;
std::vector<Candidate> device_candidates(const ChooseDeviceRequest& request);

// Those worth a trial where `smaller` was measured at the next smaller range: without what was far
// behind the best of its own algorithm there. Chunks that are too small for a message, or workers
// that are too many, are so for a larger one. All ranks must bring the same.
std::vector<Candidate> without_slow_variants(const std::vector<Candidate>& candidates,
                                             const Entry& smaller);

// The chosen plan, or else the best of the measured ones that serves; without any the delegate.
Candidate best_of(const Decision& decision,
                  const std::function<bool(const Candidate& candidate)>& serves);

DevicePlan to_device_plan(const Candidate& candidate, std::string reason);

}  // namespace dpt
