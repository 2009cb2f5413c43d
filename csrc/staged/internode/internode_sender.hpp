// Carries a rank's blocks between its node and the others, from the slots of a staged group and
// back into them: host memory that devices fill and empty goes to the network as it is.
//
// All that a chunk has in a slot is one block for each node, in the order of nodes:
//   all_reduce      shares of the result; nodes collect theirs, then spread them
//   reduce_scatter  the pieces of a node's ranks; nodes collect theirs
//   all_gather      what a rank gives and its partners on the other nodes give; they spread it
//
// A node that collects sends the others their blocks and adds what they have of its own one, in the
// order of nodes. A node that spreads sends them its own block. So a node's link carries (N-1)/N of
// the message for each. Chunks of results are dealt out to the ranks of a node, and every rank
// carries what is in its own slot; ranks of one place on their nodes do the same and are partners.
//
// Both sides of a connection post alike: first what operation they are in, then chunk after chunk.
// They collect a chunk before they spread the one before it, so that both are under way.
//
// Nothing here waits: the first worker comes by, as it does for all else that it looks after.
// Thread safety: that worker's alone.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "staged/board.hpp"
#include "staged/internode/between.hpp"
#include "staged/job.hpp"

namespace dpt::staged {

// Adds to a job of a group that spans nodes what of it crosses the network.
void plan_travel(Job* job, Collective collective, const Membership& ranks);

class InternodeSender {
 public:
  InternodeSender(std::shared_ptr<Between> between, const Membership& ranks, const Board& board);
  ~InternodeSender();  // gives up what is under way
  InternodeSender(const InternodeSender&) = delete;
  InternodeSender& operator=(const InternodeSender&) = delete;

  // Does what can be done for the operation that begins with chunk `first`, which ranks of this
  // node have begun; true: something. Operations come one after the other. Throws Error where a
  // partner is lost.
  bool advance(const Job& job, uint64_t first);
  // Nothing is left to do for that operation.
  bool is_through(uint64_t first) const;
  // A partner that is in another operation; -1: none is known.
  int other() const { return other_; }
  // A partner that something is to come from; -1: nothing is.
  int awaited() const;
  // Tells the group of an error that `advance` threw.
  void tell_trouble(const Error& error) const;
  // Gives up what is under way. Nothing more can be carried.
  void cancel();

 private:
  struct Ticket {
    int node;
    uint64_t number;
  };
  struct Greeting {
    uint32_t description = 0;
    uint32_t first = 0;
  };
  // One chunk under way.
  struct Trip {
    uint64_t chunk = 0;  // of the operation
    bool spreading = false;
    uint64_t first_place = 0;  // that it was the n-th to collect
    bool arrived = false;      // all that is to come in this stage
    std::vector<Ticket> sent = {};
    std::vector<Ticket> received = {};
  };

  void greet();
  bool hear();
  bool post();
  bool settle(Trip& trip);
  bool is_done(const Trip& trip) const;
  void collect(Trip& trip);
  void add_up(const Trip& trip);
  void spread(Trip& trip);
  void tell(const Trip& trip);
  bool have_come(std::vector<Ticket>* tickets);
  bool have_gone(std::vector<Ticket>* tickets);
  Ticket send(int node, const void* data, size_t bytes);
  Ticket receive(int node, void* data, size_t capacity);

  // The chunk of the operation that this rank carries as its n-th.
  uint64_t chunk(uint64_t n) const;
  uint64_t number_of(uint64_t chunk) const { return first_ + chunk; }
  bool is_there(uint64_t chunk) const;
  char* slot(uint64_t chunk) const;
  Share block(int node, uint64_t chunk) const;
  char* collected(int node, uint64_t chunk);
  Connection& to(int node) const;

  const std::shared_ptr<Between> between_;
  const Membership ranks_;
  const Board board_;
  const std::vector<int> others_;  // nodes
  const WaitContext context_;      // that names this in errors
  std::vector<char> scratch_;      // of two chunks, the others' parts of the own block

  Job job_{};
  uint64_t first_ = 0;
  int other_ = -1;
  Greeting own_;
  std::vector<Greeting> greetings_;  // by node
  std::vector<Ticket> greetings_sent_;
  std::vector<Ticket> greetings_to_come_;
  uint64_t carried_ = 0;        // chunks of the operation that are this rank's
  uint64_t num_collected_ = 0;  // of them, posted
  uint64_t num_spread_ = 0;
  std::deque<Trip> trips_;
};

}  // namespace dpt::staged
