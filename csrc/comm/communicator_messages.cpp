// The communicator's part of point to point: joining without a collective, and the way to the
// engine.
#include <sstream>

#include "bootstrap/hash_store.hpp"
#include "comm/communicator.hpp"
#include "comm/fabric.hpp"
#include "comm/invitations.hpp"
#include "transport/shm/shm_transport.hpp"

namespace dpt {
namespace {

// A rank's word in the store: its process mark, its invitation, and its process's facts.
struct Word {
  std::string mark;
  std::string invitation;
  PeerInfo peer;
};

Word parse_word(const std::string& text) {
  std::istringstream in(text);
  std::string words[7];  // mark, stamp, invitation
  for (std::string& word : words) in >> word;
  std::string rest;
  std::getline(in, rest);
  return {text, words[5] + " " + words[6], PeerInfo::parse(rest)};
}

}  // namespace

std::string Communicator::own_word() const {
  return own_process_mark() + " " + stamp_of_now() + " " + invitation_ + " " +
         Fabric::instance().self(global_ranks_[rank_]).serialize();
}

void Communicator::join_in_background(std::chrono::milliseconds limit,
                                      std::shared_ptr<Store> lent) {
  if (connected_.load(std::memory_order_acquire) || joining_.exchange(true)) return;
  progress_.enqueue([this, limit, lent] {
    const WaitContext wait{Deadline(limit),
                           [this] {
                             return "joining group " + group_name_ + " on rank " +
                                    std::to_string(global_ranks_[rank_]);
                           },
                           nullptr};
    try {
      if (retired_ && lent) lent->set(std::string(kProcessKey) + std::to_string(rank_), own_word());
      ensure_connected(wait, lent ? *lent : *store_);
      if (retired_ && segment_) segment_->leave();
    } catch (const std::exception& caught) {
      fail(DPT_ERR_SYSTEM, caught.what());  // unless it says why already
    }
  });
}

bool Communicator::retire() {
  {
    std::lock_guard lock(state_mutex_);
    if (invitation_.empty() || connected_ || failure_ || may_delegate_ > 0) return false;
  }
  try {
    store_->set(std::string(kProcessKey) + std::to_string(rank_), own_word() + kLeftMark);
  } catch (const std::exception&) {
    // The store went with the process that keeps it, so nobody can read the word.
  }
  no_store_ = std::make_unique<HashStore>();
  retired_ = true;
  Invitations::instance().reopen(invitation_, [this](const std::string& inviter) {
    join_in_background(kInvitedLimit, std::make_shared<LentStore>(inviter, *no_store_));
  });
  return !joining_;  // an invitation that came before is carried out with the own store
}

// Returns why the delegate serves this group's messages, the same on every rank, or nothing.
std::string Communicator::join_for_messages(const dpt_request& request) {
  if (connected_.load(std::memory_order_acquire)) return no_messages_;
  const std::chrono::milliseconds timeout(request.timeout_ms);
  const WaitContext wait{Deadline(timeout),
                         [this, &request] {
                           return std::string(name_of(request.collective)) + " of group " +
                                  group_name_ + " on rank " + std::to_string(global_ranks_[rank_]);
                         },
                         interrupted_};
  try {
    while (!connected_.load(std::memory_order_acquire)) {
      // Read anew each time: what an earlier group of this name left there is replaced at last.
      std::vector<PeerInfo> peers;
      std::vector<std::string> invitations;
      for (size_t rank = 0; rank < global_ranks_.size(); ++rank) {
        const std::string name = "rank " + std::to_string(global_ranks_[rank]);
        Word word = parse_word(wait_for_key(*store_,
                                            std::string(kProcessKey) + std::to_string(rank),
                                            wait,
                                            name + " did not join within the timeout of " +
                                                std::to_string(timeout.count()) +
                                                " ms and has not made the group: did it crash, or "
                                                "run without deepytorch?"));
        if (const auto pid = dead_process(word.mark)) {
          throw Error(DPT_ERR_PEER_LOST,
                      wait.describe() + ": " + name + " (pid " + *pid + ") died before it joined");
        }
        peers.push_back(std::move(word.peer));
        invitations.push_back(std::move(word.invitation));
      }
      // Messages between nodes are the delegate's, and so are the others of such a group: a receive
      // from any rank must find them all in one place.
      if (std::string why_not = kShmTransport.why_not(peers, global_ranks_); !why_not.empty()) {
        return why_not;
      }

      join_in_background(timeout, nullptr);
      for (size_t rank = 0; rank < invitations.size(); ++rank) {
        if (static_cast<int>(rank) != rank_)
          Invitations::instance().send(invitations[rank], invitation_);
      }
      {
        std::unique_lock lock(state_mutex_);
        joined_.wait_for(lock, kWaitSlice, [this] { return connected_ || failure_; });
        if (failure_) throw Error(failure_->status(), wait.describe() + ": " + failure_->what());
      }
      wait.check();
      if (!connected_ && wait.deadline.expired()) {
        throw Error(DPT_ERR_TIMEOUT,
                    wait.describe() + ": not all ranks joined within the timeout of " +
                        std::to_string(timeout.count()) + " ms");
      }
    }
  } catch (const Error& error) {
    fail(error.status(), error.what());
    throw;
  }
  return no_messages_;
}

dpt_outcome Communicator::submit_message(const dpt_request& request,
                                         dpt_done done,
                                         void* done_context,
                                         uint64_t* recorded) {
  check_usable(request);
  *recorded = record(request);
  std::string why_delegated = why_never_native(request);
  if (why_delegated.empty() && global_ranks_.size() == 1) why_delegated = "a group of one rank";
  if (why_delegated.empty()) why_delegated = join_for_messages(request);
  if (!why_delegated.empty()) {
    return start_on_delegate(request, {.reason = std::move(why_delegated)}, *recorded);
  }
  FlightRecord::instance().note(*recorded, FlightRecord::kNative);
  return messages().submit(request, *recorded, done, done_context);
}

PointToPoint& Communicator::messages() {
  std::lock_guard lock(state_mutex_);
  if (!messages_) {
    messages_ = std::make_unique<PointToPoint>(PointToPoint::Host{
        .segment = *segment_,
        .group = group_name_,
        .statistics = statistics_,
        .interrupted = interrupted_,
        .fail = [this](const Error& reason) { fail(reason.status(), reason.what()); },
        .caller_style = wait_style(0, /*in_caller=*/true)});
  }
  return *messages_;
}

}  // namespace dpt
