// Point to point without threads: matches this rank's posted sends and receives with what its peers
// posted, and moves the messages. Whoever calls it owns it for that time (comm/point_to_point.hpp).
//
// NOTE [Messages] Small messages lie in the mailbox's ring, so sending them ends at once. Large
// ones are announced there, in the same order, and their content moves in the cheapest way once a
// receive matches. The receiver copies it from the sender's registered memory, or the sender writes
// it to the receiver's, or it goes through the mailbox's slots. A receiver takes letters from the
// ring only while it has a receive that could match. It keeps those that did not match on its heap,
// so messages with other tags never stand in the way. A rank that receives nothing stores nothing.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/types.hpp"
#include "base/wait.hpp"
#include "transport/shm/mailbox.hpp"
#include "transport/shm/segment.hpp"

namespace dpt {

// One posted send or receive.
struct Post {
  bool is_send;
  int peer;     // as the caller named it, or DPT_ANY_RANK
  int partner;  // the same until a message from any rank has matched; the driver's
  int tag;
  DataType dtype;
  size_t count;
  const void* input;
  void* output;
  int* source;  // receives the sender's rank; may be nullptr
  uint64_t number;
  Deadline deadline;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();

  // How it ended, and whom to tell; guarded by PointToPoint.
  bool finished = false;
  std::optional<Error> error = std::nullopt;
  bool started = false;  // the caller went on: tell `done`
  dpt_done done = nullptr;
  void* done_context = nullptr;
  uint64_t recorded = 0;  // its number in the flight record

  size_t bytes() const { return count * size_of(dtype); }
};
using PostPtr = std::shared_ptr<Post>;

class MessageExchange {
 public:
  using Finish = std::function<void(const PostPtr& post, std::optional<Error> error)>;

  // `finish` is called once for each post, from within the functions below.
  MessageExchange(Segment& segment, std::string group, Finish finish);

  void post(PostPtr post);
  // Does what can be done without waiting; true when something moved.
  bool progress();
  // Ends what waits for a rank that has left and can't come any more.
  void end_those_waiting_for_who_left();
  // Ends everything: the post that `error` is about with just that, the others because of it.
  void end_all(const Error& error);
  // An unfinished post whose deadline has passed, or nullptr.
  PostPtr first_expired() const;
  // "recv #3 (10 x float32 from rank 1, tag 0) of group g on rank 0"
  std::string describe(const Post& post) const;

 private:
  struct Unexpected {
    uint64_t arrival;
    Letter letter;
    std::vector<char> content;
  };
  struct Match {
    PostPtr post;
    Letter letter;
  };
  // A reply that is not in the mailbox yet, and the receive that ends once it is: until then
  // somebody drives.
  struct Answer {
    Reply reply;
    PostPtr post = nullptr;  // nullptr: it goes on
    std::optional<Error> error = std::nullopt;
  };
  // A large message on its way.
  struct Transfer {
    enum Way { kTake, kPlace, kSlots };
    PostPtr post;
    Way way;
    uint64_t number;
    uint64_t offset;  // in the registered memory that `way` uses
    size_t done = 0;
  };
  struct Peer {
    int rank = 0;
    Mailbox out;  // from here to the peer
    Mailbox in;
    uint64_t letters = 0;                   // posted to the peer
    std::deque<PostPtr> sends;              // not yet in the ring
    std::map<uint64_t, PostPtr> announced;  // by letter number, unanswered
    std::optional<Transfer> sending;
    int receives = 0;                                  // unmatched ones from this peer
    std::map<int, std::deque<Unexpected>> unexpected;  // by tag
    std::deque<Match> matched;                         // announced by the peer, not yet granted
    std::optional<Transfer> receiving;
    std::deque<Answer> answers;
  };

  bool progress_sends(Peer& peer);
  bool progress_receives(Peer& peer);
  bool post_letter(Peer& peer, const PostPtr& post);
  void answered(Peer& peer, const Reply& reply);
  bool send_on(Peer& peer);
  bool receive_on(Peer& peer);
  void answer(Peer& peer, Answer answer);
  bool answer_on(Peer& peer);
  void grant_next(Peer& peer);
  bool post_matches_unexpected(const PostPtr& post);
  bool waits_for_letters(const Peer& peer) const;
  PostPtr take_receive_for(Peer& peer, int tag);
  void match(Peer& peer, const PostPtr& post, const Letter& letter, const char* content);
  void forget(const PostPtr& post);
  void finish(const PostPtr& post, std::optional<Error> error = std::nullopt);
  Error mismatch(const Post& post, int peer, uint64_t count, int32_t dtype) const;
  std::string rank_name(int rank) const;

  Segment& segment_;
  std::string group_;
  Finish finish_;
  std::vector<Peer> peers_;
  // Unmatched, by the peer as the caller named it and the tag, each queue in posting order.
  std::map<std::pair<int, int>, std::deque<PostPtr>> receives_;
  int any_receives_ = 0;  // of them from DPT_ANY_RANK
  uint64_t arrivals_ = 0;
  std::map<uint64_t, PostPtr> unfinished_;  // by number
};

}  // namespace dpt
