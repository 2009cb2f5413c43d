// Everything between this rank and one rank of another node: some data sockets and a control
// socket.
//
// Messages are numbered in the order they are posted, in each direction; both sides post alike, as
// all ranks run the same operations. The reactor's thread moves long ones. Short ones are written
// by who posts them and read by who waits for them, which saves two changes of thread.
//
// Thread safety: posting and waiting belong to the one thread that runs the group's current
// operation; `abort`, `end` and the reactor's calls may come from any.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/unique_fd.hpp"
#include "base/wait.hpp"
#include "transport/tcp/framing.hpp"
#include "transport/tcp/reactor.hpp"

namespace dpt {

class Connection {
 public:
  struct Peer {
    std::string name;  // "rank 5 (10.0.0.2:4242 by eth0)"
    std::vector<UniqueFd> data;
    UniqueFd control;
    bool checksum = false;  // of what is sent to it; see NOTE [Checksums]
  };
  struct Host {
    Reactor& reactor;
    // The peer died, broke the protocol, or says that the group ended. Called from the reactor's
    // thread or a posting one.
    std::function<void(dpt_status status, const std::string& reason)> on_trouble;
    // Throws when the group has been aborted.
    std::function<void()> check;
  };
  // Names who moves a message: see above.
  enum class Mover { kCaller, kReactor };

  Connection(Peer peer, Host host);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Memory stays the connection's until the message is through. Both return its number.
  uint64_t send(const void* data, size_t bytes, Mover mover);
  uint64_t receive(void* data, size_t capacity, Mover mover);
  // Wait until that message and all before it are through. `wait_received` returns its bytes. Throw
  // Error: DPT_ERR_TIMEOUT, DPT_ERR_PEER_LOST, DPT_ERR_INTERRUPTED, or what Host::check throws.
  void wait_sent(uint64_t message, const WaitContext& wait);
  size_t wait_received(uint64_t message, const WaitContext& wait);
  // The same without waiting, of what the reactor moves. Throw as those that wait, but for
  // timeouts.
  bool is_sent(uint64_t message, const WaitContext& wait);
  bool is_received(uint64_t message, const WaitContext& wait);

  // Gives up the messages under way, whose memory goes away: where there are any, the connection
  // carries none any more.
  void cancel();

  // Tells the peer that the group ended, once; the first reason counts.
  void abort(dpt_status status, const std::string& reason);
  const std::string& name() const { return peer_name_; }

 private:
  struct Outgoing {
    const char* data;
    size_t bytes;
    size_t stripe_bytes;
    size_t assigned = 0;   // given to sockets
    size_t unwritten = 0;  // of it and the rest
    bool started = false;
  };
  struct Incoming {
    char* data;
    size_t capacity;
    Mover mover;
    size_t total = 0;
    size_t got = 0;
    bool seen = false;  // a stripe has come, so `total` is known
    bool complete() const { return seen && got == total; }
  };
  struct Socket {
    UniqueFd fd;
    uint64_t id = 0;
    uint32_t watched = 0;
    bool ended = false;  // the peer sends no more on it
    bool sending = false;
    StripeHeader out{};
    const char* out_data = nullptr;
    size_t out_done = 0;  // header and bytes
    uint64_t out_message = 0;
    bool blocked = false;  // waits for room
    StripeHeader in{};
    size_t in_done = 0;
    bool parked = false;
  };
  using Lock = std::unique_lock<std::mutex>;

  void on_data(size_t index, uint32_t events);
  void on_control(uint32_t events);
  void on_tick();
  // Each moves at most one stripe; false when the socket can't go on now.
  bool write_stripe(Socket& socket);
  bool next_stripe(Socket& socket);
  bool read_stripe(Socket& socket);
  bool read_header(Socket& socket);
  bool is_intact(const Socket& socket, const char* data);
  void write_all();
  void read_all();
  void finish_outgoing();
  void finish_incoming();
  void unpark();
  void update_interest();
  bool reactor_receives() const;
  void set_interest(Socket& socket, uint32_t events);
  void socket_failed(Socket& socket, int error);
  // Marks the connection broken; what to tell the host is kept for `report`.
  void broken(const std::string& how, dpt_status status = DPT_ERR_PEER_LOST);
  void report(Lock& lock);
  void queue_control(ControlHeader::Kind kind, dpt_status status, const std::string& text);
  void flush_control();
  void read_control();
  void check_usable(const WaitContext& wait);
  void forget_received(uint64_t message);
  void poll_sockets(Lock& lock, std::chrono::milliseconds slice);
  [[noreturn]] void time_out(Lock& lock, const WaitContext& wait);

  std::string peer_name_;
  bool checksum_;
  Host host_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Socket> sockets_;
  size_t next_socket_ = 0;  // begins the next round
  std::deque<Outgoing> outgoing_;
  uint64_t first_outgoing_ = 0;  // number of the front, so: how many have been sent
  std::deque<Incoming> incoming_;
  uint64_t first_incoming_ = 0;
  std::deque<size_t> received_bytes_;  // of messages that came and were not waited for
  uint64_t first_received_ = 0;

  UniqueFd control_;
  uint64_t control_id_ = 0;
  std::string control_out_;
  std::string control_in_;
  bool left_ = false;  // the peer said farewell
  bool said_abort_ = false;
  std::chrono::steady_clock::time_point ended_at_{};  // when a data socket ended
  bool any_ended_ = false;
  std::chrono::steady_clock::time_point heard_at_;
  std::chrono::steady_clock::time_point ticked_at_;  // the reactor, which hears
  std::chrono::steady_clock::time_point ticked_before_;
  std::optional<Error> failure_;
  bool reported_ = true;
};

}  // namespace dpt
