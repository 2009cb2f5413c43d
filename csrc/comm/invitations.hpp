// How a rank asks the others of its node to join a group that they have made but not used yet.
//
// NOTE [Invitations] A group's ranks meet at its first operation. For a collective that is enough:
// every rank comes. The first send or receive may concern two ranks only, and the others may never
// call anything. So each process listens on one datagram socket, each rank leaves its address and
// the group's secret number in the store when it makes the group, and a rank that wants to send or
// receive in a group that is not connected invites all the others. An invited rank joins on the
// group's progress thread, whatever its own program is doing. Hence every message of a group takes
// one way: its ranks first agree, as for collectives, whether they share memory.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace dpt {

// Thread safety: all functions from any thread.
class Invitations {
 public:
  // The process's one; its thread starts here and sleeps until somebody invites.
  static Invitations& instance();

  // From now on `invited` is called, in the listening thread, for each invitation; it must be
  // quick. Returns the two words that peers of this node need for `send`.
  std::string open(std::function<void()> invited);
  // When it returns, `invited` is not running and will not be called.
  void close(const std::string& words);
  // Without waiting; lost when the addressee is not there.
  void send(const std::string& words) const;

 private:
  Invitations();
  void run();

  int socket_ = -1;
  std::string address_;
  std::mutex mutex_;
  std::map<std::string, std::function<void()>> open_;  // by secret number
};

}  // namespace dpt
