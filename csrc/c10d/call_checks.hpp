// The checks of calls that a program asked for (deepytorch's debugging options): whether all ranks
// start the same operation, and whether their numbers are sound.
//
// Thread safety: it holds no state of its own; any thread.
#pragma once

#include <cstdint>

#include "call.hpp"
#include "group_setup.hpp"

namespace dpt::c10d_adapter {

class CallChecks {
 public:
  explicit CallChecks(const GroupSetup& setup) : setup_(setup) {}

  bool are_on() const { return setup_.hooks.inspect || setup_.hooks.compare; }
  // Throws where the other ranks are about to start another collective.
  void compare(const Call& call) const {
    if (setup_.hooks.compare && !call.is_message()) setup_.hooks.compare(signature_of(call));
  }
  // Ends the group where a tensor that is going to be summed is not sound, and throws. One rank's
  // bad numbers would be in everybody's result: no rank goes on, and all hear whose.
  void inspect(const Call& call, uint64_t sequence, dpt_comm* comm) const {
    if (setup_.hooks.inspect) inspect_inputs(call, sequence, comm);
  }

 private:
  // Describes a collective in words that are the same on all ranks.
  static std::string signature_of(const Call& call);
  void inspect_inputs(const Call& call, uint64_t sequence, dpt_comm* comm) const;

  const GroupSetup& setup_;
};

}  // namespace dpt::c10d_adapter
