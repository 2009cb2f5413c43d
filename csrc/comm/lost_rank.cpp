#include "comm/lost_rank.hpp"

#include "base/error.hpp"
#include "transport/shm/segment.hpp"

namespace dpt {

LostRank::Patience& LostRank::patience() {
  static Patience patience;
  return patience;
}

void LostRank::look(const Segment& segment, Time now) {
  if (since_) return;
  try {
    segment.throw_if_aborted();
  } catch (const Error& error) {
    if (error.status() == DPT_ERR_PEER_LOST) note(error.what(), true, now);
    return;
  }
  for (int rank = 0; rank < segment.size(); ++rank) {
    if (!segment.has_left(rank)) continue;
    note("rank " + std::to_string(segment.global_rank(rank)) +
             " has left the group (destroy_process_group, or its program's end)",
         false,
         now);
    return;
  }
}

void LostRank::note(const std::string& who, bool died, Time now) {
  {
    const std::lock_guard lock(mutex_);
    who_ = who;
  }
  died_ = died;
  since_ = now;
}

std::string LostRank::who() const {
  const std::lock_guard lock(mutex_);
  return who_;
}

bool LostRank::is_long_gone(Time now) const {
  return since_ && now - *since_ >= patience().arrival;
}

bool LostRank::keeps_waiting(bool waits, Time now) {
  if (!waits) {
    waits_since_.reset();
    return false;
  }
  if (!waits_since_) waits_since_ = now;
  return now - *waits_since_ >= (died_ ? patience().with_dead : patience().with_left);
}

}  // namespace dpt
