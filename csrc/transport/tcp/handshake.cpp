#include "transport/tcp/handshake.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "base/random_bytes.hpp"

namespace dpt {
namespace {

struct Challenge {
  uint32_t magic = kTcpMagic;
  uint16_t version = kTcpVersion;
  uint16_t bytes = sizeof(Challenge);
  std::array<uint8_t, 32> nonce{};
  Digest proof{};
};

struct Answer {
  Digest proof{};
};

struct Welcome {
  uint32_t magic = kTcpMagic;
};

// Every message that can come from a stranger begins so.
struct Prefix {
  uint32_t magic;
  uint16_t version;
  uint16_t bytes;
};

static_assert(sizeof(Hello) == 84 && sizeof(Challenge) == 72, "no padding on the wire");

template <typename T>
std::string bytes_of(const T& message) {
  return {reinterpret_cast<const char*>(&message), sizeof message};
}

template <typename T>
T message_of(const std::string& bytes) {
  T message;
  std::memcpy(static_cast<void*>(&message), bytes.data(), sizeof message);
  return message;
}

void check_prefix(const std::string& bytes, size_t expected) {
  const auto prefix = message_of<Prefix>(bytes);
  if (prefix.magic != kTcpMagic) {
    throw Error(DPT_ERR_SYSTEM, "the other side does not speak deepytorch's protocol");
  }
  if (prefix.version != kTcpVersion) {
    throw Error(DPT_ERR_SYSTEM,
                "the other side speaks version " + std::to_string(prefix.version) +
                    " of the protocol, this one " + std::to_string(kTcpVersion) +
                    ": install the same version of deepytorch on every node");
  }
  if (prefix.bytes != expected) {
    throw Error(DPT_ERR_SYSTEM, "the other side sent a greeting of a wrong size");
  }
}

bool speaks_another_version(const std::string& bytes) {
  const auto prefix = message_of<Prefix>(bytes);
  return prefix.magic == kTcpMagic && prefix.version != kTcpVersion;
}

}  // namespace

std::string random_secret() {
  std::string secret(32, '\0');
  fill_random(secret.data(), secret.size());
  return secret;
}

Handshake Handshake::client(const Acquaintance& own, uint32_t to, uint32_t socket) {
  Handshake side(own, false);
  std::memcpy(side.hello_.group.data(),
              own.group.data(),
              std::min(own.group.size(), side.hello_.group.size()));
  side.hello_.from = own.me;
  side.hello_.to = to;
  side.hello_.socket = socket;
  fill_random(side.hello_.nonce.data(), side.hello_.nonce.size());
  side.begin(Step::kHello);
  return side;
}

Handshake Handshake::server(const Acquaintance& own) {
  Handshake side(own, true);
  side.begin(Step::kHello);
  return side;
}

bool Handshake::writes() const {
  const bool of_client = step_ == Step::kHello || step_ == Step::kAnswer;
  return of_client != is_server_;
}

Digest Handshake::proof(const char* role) const {
  const std::string nonce(server_nonce_.begin(), server_nonce_.end());
  return hmac_sha256(own_.secret, std::string("deepytorch ") + role + bytes_of(hello_) + nonce);
}

void Handshake::begin(Step step) {
  step_ = step;
  done_ = 0;
  buffer_.clear();
  switch (step) {
    case Step::kHello:
      expected_ = sizeof(Hello);
      if (writes()) buffer_ = bytes_of(hello_);
      break;
    case Step::kChallenge:
      expected_ = sizeof(Challenge);
      if (writes()) buffer_ = write_challenge();
      break;
    case Step::kAnswer:
      expected_ = sizeof(Answer);
      if (writes()) buffer_ = bytes_of(Answer{proof("client")});
      break;
    case Step::kWelcome:
      expected_ = sizeof(Welcome);
      if (writes()) buffer_ = bytes_of(Welcome{});
      break;
  }
  buffer_.resize(expected_);
}

std::string Handshake::write_challenge() {
  fill_random(server_nonce_.data(), server_nonce_.size());
  return bytes_of(Challenge{.nonce = server_nonce_, .proof = proof("server")});
}

void Handshake::check_hello() const {
  std::array<char, 32> group{};
  std::memcpy(group.data(), own_.group.data(), std::min(own_.group.size(), group.size()));
  const bool known = hello_.to == own_.me && hello_.from < own_.size && hello_.from != own_.me &&
                     hello_.socket < own_.sockets;
  if (hello_.group != group || !known) {
    throw Error(DPT_ERR_SYSTEM, "the other side looks for another group or rank");
  }
}

// A whole message has come.
void Handshake::received() {
  switch (*step_) {
    case Step::kHello:
      check_prefix(buffer_, sizeof(Hello));
      hello_ = message_of<Hello>(buffer_);
      check_hello();
      break;
    case Step::kChallenge: {
      check_prefix(buffer_, sizeof(Challenge));
      const auto challenge = message_of<Challenge>(buffer_);
      server_nonce_ = challenge.nonce;
      if (!equal_in_constant_time(challenge.proof, proof("server"))) {
        throw Error(DPT_ERR_SYSTEM, "the other side does not know the group's secret");
      }
      break;
    }
    case Step::kAnswer:
      if (!equal_in_constant_time(message_of<Answer>(buffer_).proof, proof("client"))) {
        throw Error(DPT_ERR_SYSTEM, "the other side does not know the group's secret");
      }
      break;
    case Step::kWelcome:
      if (message_of<Welcome>(buffer_).magic != kTcpMagic) {
        throw Error(DPT_ERR_SYSTEM, "the other side sent no proper welcome");
      }
      break;
  }
}

Handshake::State Handshake::advance(int fd) {
  while (step_) {
    const bool writing = writes();
    while (done_ < expected_) {
      const ssize_t moved =
          writing ? send(fd, buffer_.data() + done_, expected_ - done_, MSG_NOSIGNAL | MSG_DONTWAIT)
                  : recv(fd, buffer_.data() + done_, expected_ - done_, MSG_DONTWAIT);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0 && errno == EAGAIN) return writing ? State::kWriting : State::kReading;
      if (moved < 0) throw_system_error("handshake");
      if (moved == 0) {
        throw Error(DPT_ERR_SYSTEM, "the other side hung up during the handshake");
      }
      done_ += static_cast<size_t>(moved);
      // A peer that speaks another version may send less than this one expects.
      if (!writing && *step_ <= Step::kChallenge && done_ >= sizeof(Prefix)) {
        if (is_server_ && speaks_another_version(buffer_)) {
          const Prefix own{kTcpMagic, kTcpVersion, sizeof(Challenge)};  // so that it can say why
          [[maybe_unused]] const ssize_t sent = send(fd, &own, sizeof own, MSG_NOSIGNAL);
        }
        check_prefix(buffer_, expected_);
      }
    }
    if (!writing) received();
    if (*step_ == Step::kWelcome) {
      step_.reset();
    } else {
      begin(static_cast<Step>(static_cast<int>(*step_) + 1));
    }
  }
  return State::kDone;
}

}  // namespace dpt
