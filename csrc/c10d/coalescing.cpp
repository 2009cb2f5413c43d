#include "coalescing.hpp"

#include <algorithm>
#include <utility>

#include "work.hpp"

namespace dpt::c10d_adapter {

void Coalescing::start() {
  is_open_ = true;
  works_.clear();
  results_.clear();
  delegates_.clear();
}

WorkPtr Coalescing::end() {
  is_open_ = false;
  for (const BackendPtr& delegate : std::exchange(delegates_, {})) {
    works_.push_back(delegate->endCoalescing());
  }
  return join_works(
      setup_.rank, c10d::OpType::COALESCED, std::exchange(works_, {}), std::exchange(results_, {}));
}

WorkPtr Coalescing::note(WorkPtr work, const Call& call) {
  if (is_open_) {
    if (work) works_.push_back(work);
    results_.insert(results_.end(), call.results.begin(), call.results.end());
  }
  return work;
}

[[gnu::hot]] WorkPtr Coalescing::start_on(const BackendPtr& delegate, const Replay& replay) {
  if (is_open_ && delegate->supportsCoalescing()) {
    if (std::find(delegates_.begin(), delegates_.end(), delegate) == delegates_.end()) {
      delegate->startCoalescing();
      delegates_.push_back(delegate);
    }
    replay.on(*delegate);
    return nullptr;  // one work for all of them comes from the delegate's endCoalescing
  }
  return replay.on(*delegate);
}

}  // namespace dpt::c10d_adapter
