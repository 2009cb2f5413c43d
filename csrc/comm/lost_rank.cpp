#include "comm/lost_rank.hpp"

#include "base/error.hpp"
#include "transport/shm/segment.hpp"

namespace dpt {
namespace {

// NCCL's messages end with what it comes from, and begin with where in the source it happened.
std::string in_short(const std::string& message) {
  static constexpr std::string_view kMark = "Last error:\n";
  const size_t mark = message.find(kMark);
  const size_t begin = mark == std::string::npos ? 0 : mark + kMark.size();
  const size_t end = message.find('\n', begin);
  const std::string line = message.substr(begin, end == std::string::npos ? end : end - begin);
  return line.empty() ? message.substr(0, message.find('\n')) : line;
}

}  // namespace

LostRank::Patience& LostRank::patience() {
  static Patience patience;
  return patience;
}

void LostRank::look(const Segment& segment, Time now) {
  if (since_ && how_ != How::kStockFailed) return;
  if (!look_for_gone(segment, now)) look_for_failed(segment, now);
}

bool LostRank::look_for_gone(const Segment& segment, Time now) {
  try {
    segment.throw_if_aborted();
  } catch (const Error& error) {
    if (error.status() == DPT_ERR_PEER_LOST) note(error.what(), How::kDied, now);
    return true;
  }
  for (int rank = 0; rank < segment.size(); ++rank) {
    if (!segment.has_left(rank)) continue;
    if (const std::string why = segment.stock_failure(rank); !why.empty() && !since_) {
      note_failed(segment, rank, why, now);
    }
    note("rank " + std::to_string(segment.global_rank(rank)) + kHasLeft, How::kLeft, now);
    return true;
  }
  return false;
}

// It lives, and may yet succeed in another attempt.
void LostRank::look_for_failed(const Segment& segment, Time now) {
  for (int rank = 0; rank < segment.size(); ++rank) {
    const std::string why = segment.stock_failure(rank);
    if (why.empty() || rank == segment.rank()) continue;
    if (!since_) note_failed(segment, rank, why, now);
    return;
  }
  if (!since_) return;
  since_.reset();
  waits_since_.reset();
  failed_ = false;
  const std::lock_guard lock(mutex_);
  who_.clear();
}

void LostRank::note_failed(const Segment& segment, int rank, const std::string& why, Time now) {
  const std::string who = "rank " + std::to_string(segment.global_rank(rank));
  note(who + " could not go on with it: " + why, How::kStockFailed, now);
}

void LostRank::note(const std::string& who, How how, Time now) {
  {
    const std::lock_guard lock(mutex_);
    // Why it is gone says more than that it is.
    who_ = failed_ ? who_ + "; then " + who : who;
  }
  how_ = how;
  failed_ |= how == How::kStockFailed;
  since_ = now;
}

std::string LostRank::who() const {
  const std::lock_guard lock(mutex_);
  return who_;
}

bool LostRank::is_long_gone(Time now) const {
  return since_ && how_ != How::kStockFailed && now - *since_ >= patience().arrival;
}

bool LostRank::keeps_waiting(bool waits, Time now) {
  if (!waits) {
    waits_since_.reset();
    return false;
  }
  if (!waits_since_) waits_since_ = now;
  const auto enough = failed_              ? patience().with_failed
                      : how_ == How::kDied ? patience().with_dead
                                           : patience().with_left;
  return now - *waits_since_ >= enough;
}

[[gnu::hot]] void before_delegate(Segment* segment) {
  if (segment != nullptr) segment->note_stock_failure("");
}

dpt_status after_delegate(Segment* segment, dpt_status status, const dpt_error& error) {
  if (status != DPT_ERR_DELEGATE_BROKE) return status;
  if (segment != nullptr) segment->note_stock_failure(in_short(error.message));
  return DPT_ERR_DELEGATE;
}

}  // namespace dpt
