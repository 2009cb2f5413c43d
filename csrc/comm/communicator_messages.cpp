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
         Fabric::instance().self(facts_.global_rank()).serialize();
}

void Communicator::join_in_background(std::chrono::milliseconds limit,
                                      std::shared_ptr<Store> lent) {
  if (state_.is_connected() || joining_.exchange(true)) return;
  progress_.enqueue([this, limit, lent] {
    const WaitContext wait{
        Deadline(limit), [this] { return "joining " + facts_.place(); }, nullptr};
    try {
      if (retired_ && lent)
        lent->set(std::string(kProcessKey) + std::to_string(facts_.rank), own_word());
      ensure_connected(wait, lent ? *lent : *store_);
      if (retired_ && transports_.segment) transports_.segment->leave();
    } catch (const std::exception& caught) {
      state_.fail(DPT_ERR_SYSTEM, caught.what());  // unless it says why already
    }
  });
}

bool Communicator::retire() {
  if (invitation_.empty() || !state_.may_yet_connect() || delegation_.is_ahead()) return false;
  try {
    store_->set(std::string(kProcessKey) + std::to_string(facts_.rank), own_word() + kLeftMark);
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
  if (state_.is_connected()) return transports_.why_no_messages;
  const std::chrono::milliseconds timeout(request.timeout_ms);
  const WaitContext wait{Deadline(timeout),
                         [this, &request] { return facts_.describe(request.collective); },
                         facts_.interrupted};
  try {
    while (!state_.is_connected()) {
      // Read anew each time: what an earlier group of this name left there is replaced at last.
      std::vector<PeerInfo> peers;
      std::vector<std::string> invitations;
      for (size_t rank = 0; rank < facts_.global_ranks.size(); ++rank) {
        const std::string name = "rank " + std::to_string(facts_.global_ranks[rank]);
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
      if (std::string why_not = kShmTransport.why_not(peers, facts_.global_ranks);
          !why_not.empty()) {
        return why_not;
      }

      join_in_background(timeout, nullptr);
      for (size_t rank = 0; rank < invitations.size(); ++rank) {
        if (static_cast<int>(rank) != facts_.rank)
          Invitations::instance().send(invitations[rank], invitation_);
      }
      if (const auto failure = state_.wait_until_connected()) {
        throw Error(failure->status(), wait.describe() + ": " + failure->what());
      }
      wait.check();
      if (!state_.is_connected() && wait.deadline.expired()) {
        throw Error(DPT_ERR_TIMEOUT,
                    wait.describe() + ": not all ranks joined within the timeout of " +
                        std::to_string(timeout.count()) + " ms");
      }
    }
  } catch (const Error& error) {
    state_.fail(error.status(), error.what());
    throw;
  }
  return transports_.why_no_messages;
}

dpt_outcome Communicator::submit_message(const dpt_request& request,
                                         dpt_done done,
                                         void* done_context,
                                         uint64_t* recorded) {
  state_.check_usable(request);
  *recorded = facts_.record(request);
  std::string why_delegated = facts_.why_never_native(request);
  if (why_delegated.empty() && facts_.global_ranks.size() == 1)
    why_delegated = "a group of one rank";
  if (why_delegated.empty()) why_delegated = join_for_messages(request);
  if (!why_delegated.empty()) {
    return delegation_.start(request, {.reason = std::move(why_delegated)}, *recorded);
  }
  FlightRecord::instance().note(*recorded, FlightRecord::kNative);
  return messages().submit(request, *recorded, done, done_context);
}

PointToPoint& Communicator::messages() {
  std::lock_guard lock(messages_mutex_);
  if (!messages_) {
    messages_ = std::make_unique<PointToPoint>(PointToPoint::Host{
        .segment = *transports_.segment,
        .group = facts_.name,
        .statistics = facts_.statistics,
        .interrupted = facts_.interrupted,
        .fail = [this](const Error& reason) { state_.fail(reason.status(), reason.what()); },
        .caller_style = transports_.wait_style(0, /*in_caller=*/true)});
  }
  return *messages_;
}

}  // namespace dpt
