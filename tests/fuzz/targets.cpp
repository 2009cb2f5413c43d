#include "targets.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "base/error.hpp"
#include "base/json.hpp"
#include "topology/topology.hpp"
#include "transport/tcp/connection.hpp"
#include "transport/tcp/handshake.hpp"
#include "tuner/profile.hpp"

namespace dpt::fuzz {
namespace {

// Aborts, with the reason, where a promise is broken; works in every build.
void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: broken promise: %s\n", what);
  std::abort();
}

// Runs `function`; whether it ended without an Error, which may only be `allowed`.
template <typename Function>
bool accepted(dpt_status allowed, Function function) {
  try {
    function();
    return true;
  } catch (const Error& error) {
    require(error.status() == allowed, error.what());
    return false;
  }
}

std::string text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

void put(int fd, const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t sent =
        ::send(fd, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent <= 0) return;  // full, or the other side has had enough
    done += static_cast<size_t>(sent);
  }
}

struct Pair {
  UniqueFd one;
  UniqueFd other;
  Pair() {
    int fds[2];
    DPT_SYS_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds));
    one = UniqueFd(fds[0]);
    other = UniqueFd(fds[1]);
  }
};

Reactor& reactor() {
  static auto* const instance = new Reactor;
  return *instance;
}

constexpr size_t kCapacity = 4096;
constexpr int kMessages = 3;
constexpr std::chrono::milliseconds kLimit{20000};

// A connection whose peer sends the bytes and hangs up.
void play(const std::string& data, const std::string& control_words) {
  Pair first, second, control_pair;
  std::mutex mutex;
  std::optional<Error> trouble;
  Connection::Peer peer;
  peer.name = "the fuzzer";
  peer.data.push_back(std::move(first.one));
  peer.data.push_back(std::move(second.one));
  peer.control = std::move(control_pair.one);
  const Connection::Host host{reactor(),
                              [&](dpt_status status, const std::string& reason) {
                                std::lock_guard lock(mutex);
                                if (!trouble) trouble.emplace(status, reason);
                              },
                              [&] {
                                std::lock_guard lock(mutex);
                                if (trouble) throw *trouble;
                              }};
  // Guard bytes behind each message: a header may lie about lengths, but nothing is written there.
  std::vector<std::vector<char>> memory(kMessages, std::vector<char>(kCapacity + 64, 0x5a));
  Connection connection(std::move(peer), host);
  // Two sockets: each gets one half.
  put(first.other.get(), data.substr(0, data.size() / 2));
  put(second.other.get(), data.substr(data.size() / 2));
  put(control_pair.other.get(), control_words);
  first.other = UniqueFd();
  second.other = UniqueFd();
  control_pair.other = UniqueFd();
  std::vector<uint64_t> numbers;
  for (auto& each : memory) {
    numbers.push_back(connection.receive(each.data(), kCapacity, Connection::Mover::kCaller));
  }
  const WaitContext wait{Deadline(kLimit), [] { return std::string("the fuzzer"); }, nullptr};
  try {
    for (const uint64_t number : numbers) {
      require(connection.wait_received(number, wait) <= kCapacity, "a message fits its buffer");
    }
  } catch (const Error& error) {
    require(error.status() != DPT_ERR_TIMEOUT, "a broken peer is noticed");
    require(error.status() != DPT_ERR_INTERNAL, error.what());
  }
  connection.cancel();
  for (const auto& each : memory) {
    for (size_t i = kCapacity; i < each.size(); ++i) {
      require(each[i] == 0x5a, "nothing is written past a buffer");
    }
  }
}

void greet(Handshake side, const std::string& bytes) {
  Pair pair;
  put(pair.other.get(), bytes);
  shutdown(pair.other.get(), SHUT_WR);
  accepted(DPT_ERR_SYSTEM, [&] {
    // Nobody can know the secret or foresee the nonce, so it never ends well.
    while (side.advance(pair.one.get()) != Handshake::State::kDone) {
    }
    require(false, "a stranger was believed");
  });
}

}  // namespace

int json(const uint8_t* data, size_t size) {
  dpt::json::Value value;
  const std::string text = text_of(data, size);
  if (!accepted(DPT_ERR_INVALID, [&] { value = dpt::json::parse(text); })) return 0;
  const std::string written = dpt::json::dump(value);
  require(dpt::json::dump(dpt::json::parse(written)) == written, "JSON reads what it wrote");
  return 0;
}

int profile(const uint8_t* data, size_t size) {
  const ProfileKey key{"a machine", "1.2.3", {4, true}};
  const std::string text = text_of(data, size);
  accepted(DPT_ERR_INVALID, [&] { device_tables(text, "1.2.3"); });
  std::optional<TimingTable> table;
  if (!accepted(DPT_ERR_INVALID, [&] { table = find_in_profile(text, key); })) return 0;
  std::string merged;
  const bool merges = accepted(DPT_ERR_INVALID, [&] {
    merged = merge_into_profile(text, key, table.value_or(TimingTable{}));
  });
  if (merges) require(find_in_profile(merged, key).has_value(), "a profile keeps what is put in");
  return 0;
}

int topology(const uint8_t* data, size_t size) {
  Topology found;
  const std::string text = text_of(data, size);
  if (!accepted(DPT_ERR_INVALID, [&] { found = load_topology(text); })) return 0;
  const std::string written = dump_topology(found);
  require(dump_topology(load_topology(written)) == written, "a topology reads what it wrote");
  has_full_nvlink(found);
  return 0;
}

int framing(const uint8_t* data, size_t size) {
  play(text_of(data, size), "");
  return 0;
}

int control(const uint8_t* data, size_t size) {
  play("", text_of(data, size));
  return 0;
}

int handshake(const uint8_t* data, size_t size) {
  const Acquaintance own{"the group's secret", "0123456789abcdef0123456789abcdef", 1, 4, 3};
  const std::string bytes = text_of(data, size);
  greet(Handshake::server(own), bytes);
  greet(Handshake::client(own, 0, 1), bytes);
  return 0;
}

const std::vector<std::pair<std::string, Target>>& targets() {
  static const std::vector<std::pair<std::string, Target>> all{{"json", json},
                                                               {"profile", profile},
                                                               {"topology", topology},
                                                               {"framing", framing},
                                                               {"control", control},
                                                               {"handshake", handshake}};
  return all;
}

}  // namespace dpt::fuzz
