// Brings the ranks of a group together. They meet in its first operation that can be native, as all
// of them come to it. A rank that sends or receives invites the others instead
// (comm/invitations.hpp, NOTE [Invitations]). Until then nobody waits for anybody.
//
// Locks: it has none of its own. One thread at a time connects, as the group's progress runs its
// tasks one by one; the others wait in the group's state. The process's listening thread calls with
// the invitations' lock held, and then only the progress's lock is taken, to enqueue. `open`,
// `close` and `retire` belong to the one thread that makes and ends the group.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/wait.hpp"
#include "bootstrap/store.hpp"
#include "comm/group_facts.hpp"
#include "comm/group_state.hpp"
#include "comm/progress.hpp"
#include "staged/internode/between.hpp"

namespace dpt {

class GroupBootstrap {
 public:
  // How long a rank can be asked to join, once the program has left all of its groups.
  static constexpr std::chrono::seconds kLeavingTime{2};

  // Called on every rank when the group has transports, before it counts as connected.
  using Met = std::function<void(const WaitContext&)>;

  GroupBootstrap(
      const GroupFacts& facts, GroupState& state, Progress& progress, Store& store, Met met)
      : facts_(facts), state_(state), progress_(progress), store_(store), met_(std::move(met)) {}

  // Leaves this rank's word in the store, and can be invited from then on. Not before all that an
  // invitation needs is there.
  void open();
  // When it returns no invitation is under way, and none will come.
  void close();
  // Instead of close and the group's end, where peers may yet need this rank to join; see NOTE
  // [Retired groups]. False: nobody does. The store is not used after this.
  bool retire();

  // Meets the other ranks, unless that has happened. In the group's turn.
  void connect(const WaitContext& wait) { connect(wait, store_); }
  // Returns why the delegate serves this group's messages, the same on every rank, or nothing.
  std::string join_for_messages(const dpt_request& request);
  // More connections between the nodes of a group that has some, for what goes on beside the
  // operations on host memory.
  std::shared_ptr<staged::Between> connect_between(const WaitContext& wait);

 private:
  // How long an invited rank waits for the others. They have limits of their own, and whoever
  // gives up first would end the group.
  static constexpr std::chrono::milliseconds kInvitedLimit = kLongestWait;

  // `store` is the own one, or lent: NOTE [Lent store].
  void connect(const WaitContext& wait, Store& store);
  void meet_ranks(const WaitContext& wait, Store& store);
  void check_peers(const WaitContext& wait, Store& store) const;
  std::string own_word() const;
  // With `lent` instead of this rank's own store, unless it is nullptr.
  void join_in_background(std::chrono::milliseconds limit, std::shared_ptr<Store> lent);
  // Why the delegate serves messages, by the words that the ranks left in the store; `invitations`
  // receives those of all ranks.
  std::string read_words(const dpt_request& request,
                         const WaitContext& wait,
                         std::vector<std::string>* invitations);

  const GroupFacts& facts_;
  GroupState& state_;
  Progress& progress_;
  Store& store_;
  const Met met_;
  std::string invitation_;  // empty: this group needs none
  std::atomic<bool> joining_{false};
  std::unique_ptr<Store> no_store_;  // of a retired group
  std::atomic<bool> retired_{false};
};

}  // namespace dpt
