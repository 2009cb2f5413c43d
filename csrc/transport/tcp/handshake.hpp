// How two ranks make sure of each other before a connection carries data.
//
//   client -> server  Hello      who calls whom, for which group and socket, and a nonce
//   server -> client  Challenge  a nonce, and HMAC(secret, "server", Hello, nonce)
//   client -> server  Answer     HMAC(secret, "client", Hello, nonce)
//   server -> client  Welcome    so that the client knows that it was believed
//
// The secret is made anew for every group and goes through the rendezvous store. Messages have one
// fixed size each, so nothing is allocated by what a stranger says. They begin with a magic number,
// the protocol's version and their size. The payload that follows is not encrypted.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "base/unique_fd.hpp"
#include "transport/tcp/sha256.hpp"

namespace dpt {

constexpr uint32_t kTcpMagic = 0x43545044;  // "DPTC"
constexpr uint16_t kTcpVersion = 2;

struct Hello {
  uint32_t magic = kTcpMagic;
  uint16_t version = kTcpVersion;
  uint16_t bytes = sizeof(Hello);
  std::array<char, 32> group{};  // the id of the group's meeting
  uint32_t from = 0;             // ranks in the group
  uint32_t to = 0;
  uint32_t socket = 0;  // data sockets from 0; the last one is the control socket
  std::array<uint8_t, 32> nonce{};
};

// Both sides know this already.
struct Acquaintance {
  std::string secret;  // of the group, 32 random bytes
  std::string group;
  uint32_t me;
  uint32_t size;
  uint32_t sockets;  // between two ranks, with the control socket
};

// One side of the handshake on a connection that doesn't block. Error(DPT_ERR_SYSTEM) says what is
// wrong with the other side.
class Handshake {
 public:
  enum class State { kReading, kWriting, kDone };

  static Handshake client(const Acquaintance& own, uint32_t to, uint32_t socket);
  static Handshake server(const Acquaintance& own);

  // Goes on as far as it can without waiting; what to wait for.
  State advance(int fd);
  // The rank at the other end, once done.
  uint32_t peer() const { return is_server_ ? hello_.from : hello_.to; }
  uint32_t socket() const { return hello_.socket; }
  bool is_server() const { return is_server_; }
  // The server's: the client has named this very group and rank, whose id strangers don't know.
  bool is_greeted() const { return !step_ || *step_ > Step::kHello; }
  // The client's: nothing has come from the server yet.
  bool is_unanswered() const {
    return step_ && (*step_ == Step::kHello || (*step_ == Step::kChallenge && done_ == 0));
  }

 private:
  enum class Step { kHello, kChallenge, kAnswer, kWelcome };

  Handshake(const Acquaintance& own, bool is_server) : own_(own), is_server_(is_server) {}
  bool writes() const;
  void begin(Step step);
  void received();
  Digest proof(const char* role) const;
  std::string write_challenge();
  void check_hello() const;

  Acquaintance own_;
  bool is_server_;
  Hello hello_;
  std::array<uint8_t, 32> server_nonce_{};
  std::optional<Step> step_;
  std::string buffer_;   // of the current step: what is written, or has been read
  size_t expected_ = 0;  // bytes of the current step
  size_t done_ = 0;      // of which these are through
};

// 32 bytes nobody can guess.
std::string random_secret();

}  // namespace dpt
