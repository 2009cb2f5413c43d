#include "comm/group_bootstrap.hpp"

#include <sstream>

#include "base/env.hpp"
#include "bootstrap/exchange.hpp"
#include "bootstrap/hash_store.hpp"
#include "comm/connect_transports.hpp"
#include "comm/fabric.hpp"
#include "comm/invitations.hpp"
#include "transport/shm/shm_transport.hpp"
#include "transport/tcp/tcp_transport.hpp"

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

// Each rank leaves its word there.
std::string key_of(size_t rank) { return std::string(kProcessKey) + std::to_string(rank); }

}  // namespace

void GroupBootstrap::open() {
  if (!facts_.native || facts_.size() == 1) return;
  invitation_ = Invitations::instance().open(
      [this](const std::string& inviter) {
        join_in_background(kInvitedLimit, std::make_shared<LentStore>(inviter, store_));
      },
      store_);
  store_.set(key_of(facts_.rank), own_word());
}

void GroupBootstrap::close() {
  if (!invitation_.empty()) Invitations::instance().close(invitation_);
}

void GroupBootstrap::connect(const WaitContext& wait, Store& store) {
  if (state_.is_connected()) return;
  if (facts_.size() > 1) {
    WaitContext watchful = wait;
    watchful.check_peers = [this, &watchful, &store] { check_peers(watchful, store); };
    try {
      meet_ranks(watchful, store);
    } catch (const Error& error) {
      state_.fail_operation(error, watchful);
    }
  }
  state_.set_connected();
}

void GroupBootstrap::meet_ranks(const WaitContext& wait, Store& store) {
  Fabric& fabric = Fabric::instance();
  PeerInfo self = fabric.self(facts_.global_rank());
  self.max_chunk_bytes = fabric.offer_chunk_bytes(facts_.size(), facts_.staging_bytes);
  self.fixed_chunk_bytes = env().chunk_bytes;
  const Meeting meeting = meet(store, facts_.rank, facts_.global_ranks, self.serialize(), wait);
  connect_transports(facts_, state_, meeting, wait, store);
  if (state_.transports().segment) met_(wait);
}

// There is no shared memory to notice a death by yet, but each rank left its mark in the store.
void GroupBootstrap::check_peers(const WaitContext& wait, Store& store) const {
  // Aborted or destroyed meanwhile: without a segment nothing else would end this wait.
  if (const auto failure = state_.failure()) throw *failure;
  for (size_t rank = 0; rank < facts_.global_ranks.size(); ++rank) {
    const auto mark = store.get(key_of(rank), std::chrono::milliseconds(1));
    const std::string name = "rank " + std::to_string(facts_.global_ranks[rank]);
    if (const auto pid = mark ? dead_process(*mark) : std::nullopt) {
      throw Error(DPT_ERR_PEER_LOST,
                  wait.describe() + ": " + name + " (pid " + *pid + ") died before it joined");
    }
    // Had it been asked to join, it would have by now.
    const auto since = wait.deadline.elapsed();
    if (mark && mark->ends_with(kLeftMark) && since > kLeavingTime + std::chrono::seconds(1)) {
      throw Error(DPT_ERR_PEER_LOST,
                  wait.describe() + ": " + name + kHasLeft + " before its first operation");
    }
  }
}

std::shared_ptr<staged::Between> GroupBootstrap::connect_between(const WaitContext& wait) {
  const Transports& transports = state_.transports();
  return staged::connect_between({store_,
                                  transports.nodes_key + "/gpus",
                                  facts_.rank,
                                  facts_.global_ranks,
                                  transports.nodes->layout,
                                  transports.nodes_share_host,
                                  TcpSettings::from_env()},
                                 host_of(*transports.segment),
                                 wait);
}

std::string GroupBootstrap::own_word() const {
  return own_process_mark() + " " + stamp_of_now() + " " + invitation_ + " " +
         Fabric::instance().self(facts_.global_rank()).serialize();
}

void GroupBootstrap::join_in_background(std::chrono::milliseconds limit,
                                        std::shared_ptr<Store> lent) {
  if (state_.is_connected() || joining_.exchange(true)) return;
  progress_.enqueue([this, limit, lent] {
    const WaitContext wait{
        Deadline(limit), [this] { return "joining " + facts_.place(); }, nullptr};
    try {
      if (retired_ && lent) lent->set(key_of(facts_.rank), own_word());
      connect(wait, lent ? *lent : store_);
      Segment* const segment = state_.transports().segment.get();
      if (retired_ && segment != nullptr) segment->leave();
    } catch (const std::exception& caught) {
      state_.fail(DPT_ERR_SYSTEM, caught.what());  // unless it says why already
    }
  });
}

bool GroupBootstrap::retire() {
  if (invitation_.empty() || !state_.may_yet_connect()) return false;
  try {
    store_.set(key_of(facts_.rank), own_word() + kLeftMark);
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

// Read anew each time: what an earlier group of this name left there is replaced at last.
std::string GroupBootstrap::read_words(const dpt_request& request,
                                       const WaitContext& wait,
                                       std::vector<std::string>* invitations) {
  std::vector<PeerInfo> peers;
  for (size_t rank = 0; rank < facts_.global_ranks.size(); ++rank) {
    const std::string name = "rank " + std::to_string(facts_.global_ranks[rank]);
    const std::string limit = std::to_string(request.timeout_ms);
    Word word = parse_word(wait_for_key(store_,
                                        key_of(rank),
                                        wait,
                                        name + " did not join within the timeout of " + limit +
                                            " ms and has not made the group: did it crash, or "
                                            "run without deepytorch?"));
    if (const auto pid = dead_process(word.mark)) {
      throw Error(DPT_ERR_PEER_LOST,
                  wait.describe() + ": " + name + " (pid " + *pid + ") died before it joined");
    }
    peers.push_back(std::move(word.peer));
    invitations->push_back(std::move(word.invitation));
  }
  // Messages between nodes are the delegate's. So are the other messages of such a group, because a
  // receive from any rank must find them all in one place.
  return kShmTransport.why_not(peers, facts_.global_ranks);
}

std::string GroupBootstrap::join_for_messages(const dpt_request& request) {
  if (state_.is_connected()) return state_.transports().why_no_messages;
  const std::chrono::milliseconds timeout(request.timeout_ms);
  const WaitContext wait{Deadline(timeout),
                         [this, &request] { return facts_.describe(request.collective); },
                         facts_.interrupted};
  try {
    while (!state_.is_connected()) {
      std::vector<std::string> invitations;
      if (std::string why_not = read_words(request, wait, &invitations); !why_not.empty()) {
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
  return state_.transports().why_no_messages;
}

}  // namespace dpt
