// How a rank asks the others of its node to join a group that they have made but not used yet.
//
// NOTE [Invitations] A group's ranks meet at its first operation. For a collective that is enough:
// every rank comes. The first send or receive may concern two ranks only, and the others may never
// call anything. So each process listens on one datagram socket. Each rank leaves its address and
// the group's secret number in the store when it makes the group. A rank that wants to send or
// receive in a group that is not connected invites all the others. An invited rank joins on the
// group's progress thread, whatever its own program is doing. Hence every message of a group takes
// one way: its ranks first agree, as for collectives, whether they share memory.
//
// A stranger who finds the socket's address can't hold up an invitation: NOTE [Key] in
// transport/shm/keyed_socket.hpp. A group's number begins with the key of its process's socket, a
// question's mark with that of who asks.
//
// NOTE [Lent store] The invited rank's program may be inside a wait of the rendezvous store, for
// the very ranks that invite it. And torch's TCPStore serves one call at a time. So a rank that
// invites also lends its store: the invited rank's questions travel over the datagram socket.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "bootstrap/store.hpp"
#include "transport/shm/keyed_socket.hpp"

namespace dpt {

// Thread safety: all functions from any thread.
class Invitations {
 public:
  using Invited = std::function<void(const std::string& inviter)>;

  // The process's one. While anything is open a thread listens, asleep until somebody invites.
  static Invitations& instance();

  // From now on `invited` is called, in the listening thread, for each invitation, with the words
  // of who invites; it must be quick. `store` is lent to those whom this rank invites. Returns the
  // two words that peers of this node need for `send`.
  std::string open(Invited invited, Store& store);
  // The same for a group that its program has left: it lends nothing any more.
  void reopen(const std::string& words, Invited invited);
  // When it returns, `invited` is not running and will not be called.
  void close(const std::string& words);
  // Without waiting; lost when the addressee is not there.
  void send(const std::string& to, const std::string& from) const;
  // In a forked child: closes the socket. The thread does not exist there.
  static void after_fork();

 private:
  struct Open {
    Invited invited;
    Store* store;
  };

  // A socket, the thread that listens on it, and where peers find it.
  class Listener;

  Invitations() = default;
  // The reply to a datagram; empty: none.
  std::string answer(const std::string& datagram);

  mutable std::mutex mutex_;
  std::unique_ptr<Listener> listener_;
  std::map<std::string, Open> open_;  // by secret number
};

// The store of the rank that invited with `words`, or `own` once that rank has left; see NOTE [Lent
// store].
class LentStore : public Store {
 public:
  LentStore(std::string words, Store& own) : words_(std::move(words)), own_(own) {}
  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key,
                                 std::chrono::milliseconds timeout) override;

 private:
  // Asks until answered or `timeout` has passed.
  std::optional<std::string> ask(const std::string& question, std::chrono::milliseconds timeout);

  std::string words_;
  Store& own_;
  KeyedSocket socket_;  // made by the first question
  uint64_t questions_ = 0;
};

}  // namespace dpt
