// The stock backends of a group, torch's own and the one that goes through nodes in stages. Each is
// made when it is first needed.
//
// Locks: `mutex_` guards the backends that were made, and the limit that was set since. No call
// that waits is made with it held. `making_mutex_` is held while one is made, which takes the GIL
// and meets the other ranks; `mutex_` may be taken inside. Thread safety: all functions from any
// thread.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "abandonment.hpp"
#include "group_setup.hpp"

namespace dpt::c10d_adapter {

class Delegates {
 public:
  explicit Delegates(const GroupSetup& setup) : setup_(setup) {}

  // `limit`: how long the other ranks are waited for if it is made now; 0: as long as the group
  // waits.
  BackendPtr of(const at::Device& device, Milliseconds limit = {});
  // The one that goes through nodes in stages; `node_of`: see dpt_delegate.
  BackendPtr by_nodes(const std::string& device_type, const int* node_of);
  void set_timeout(Milliseconds timeout);
  c10d::ErrorType error();
  void abort();
  // Gives up those that serve devices, see Abandonment.
  void abandon(std::function<bool()> is_starting);
  // Whether they were abandoned; then waits for the end of that.
  bool settle() const { return abandonment_.settle(); }
  // Ends them in good order. Those that were abandoned would wait for what never ends.
  void shutdown(bool are_abandoned);
  // Lets go of them, when nobody uses the group any more.
  void clear();

 private:
  // Looks for one that was made before, and else makes it.
  BackendPtr for_type(const std::string& device_type, Milliseconds limit);
  BackendPtr make_once(const std::string& key, const std::function<BackendPtr()>& make);

  const GroupSetup& setup_;
  std::mutex making_mutex_;
  std::mutex mutex_;
  std::optional<Milliseconds> later_timeout_;  // set since the group was made
  std::map<std::string, BackendPtr> backends_;
  std::array<BackendPtr, 2> known_;  // those for "cpu" and "cuda"
  Abandonment abandonment_;
};

}  // namespace dpt::c10d_adapter
