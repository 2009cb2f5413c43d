// One connection: messages in both directions against another connection, and against a peer that
// is played byte by byte.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <random>
#include <thread>

#include "base/error.hpp"
#include "transport/tcp/connection.hpp"
#include "transport/tcp/crc32c.hpp"

namespace dpt::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Mover = Connection::Mover;

Reactor& reactor() {
  static auto* const instance = new Reactor;
  return *instance;
}

WaitContext within(int timeout_ms) {
  return {Deadline(milliseconds(timeout_ms)), [] { return std::string("the test"); }, nullptr};
}

// The trouble that a side was told of.
struct Trouble {
  std::mutex mutex;
  std::condition_variable changed;
  std::string reason;
  dpt_status status = DPT_OK;

  Connection::Host host() {
    return {reactor(),
            [this](dpt_status what, const std::string& why) {
              std::lock_guard lock(mutex);
              status = what;
              reason = why;
              changed.notify_all();
            },
            [] {}};
  }
  std::string wait() {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, std::chrono::seconds(10), [&] { return !reason.empty(); });
    return reason;
  }
};

struct Ends {
  Connection::Peer one;
  Connection::Peer other;
};

Ends ends(int sockets) {
  Ends made;
  made.one.name = "rank 1 (its address)";
  made.other.name = "rank 0 (its address)";
  for (int i = 0; i <= sockets; ++i) {
    int fds[2];
    DPT_SYS_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds));
    const bool control = i == sockets;
    (control ? made.one.control : made.one.data.emplace_back()) = UniqueFd(fds[0]);
    (control ? made.other.control : made.other.data.emplace_back()) = UniqueFd(fds[1]);
  }
  return made;
}

// A connection, and the raw sockets of its peer.
struct Played {
  Trouble trouble;
  std::vector<UniqueFd> data;
  UniqueFd control;
  std::unique_ptr<Connection> connection;

  explicit Played(int sockets) {
    Ends made = ends(sockets);
    data = std::move(made.other.data);
    control = std::move(made.other.control);
    connection = std::make_unique<Connection>(std::move(made.one), trouble.host());
  }

  void put(
      int socket, uint64_t message, uint64_t offset, uint64_t total, const std::string& bytes) {
    const StripeHeader header{
        StripeHeader::kMagic, static_cast<uint32_t>(bytes.size()), message, offset, total};
    put_raw(socket, std::string(reinterpret_cast<const char*>(&header), sizeof header) + bytes);
  }
  void put_raw(int socket, const std::string& bytes) {
    ASSERT_EQ(::send(data[socket].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void say(ControlHeader::Kind kind, dpt_status status, const std::string& text) {
    const ControlHeader header{ControlHeader::kMagic,
                               kind,
                               static_cast<uint16_t>(status),
                               static_cast<uint32_t>(text.size())};
    const std::string bytes =
        std::string(reinterpret_cast<const char*>(&header), sizeof header) + text;
    ASSERT_EQ(::send(control.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  std::string error_of_wait(uint64_t message, int timeout_ms = 10000) {
    try {
      connection->wait_received(message, within(timeout_ms));
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }
};

std::string random_bytes(size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(generator());
  return bytes;
}

// Sockets, who moves, and whether the first side sends checksums; the other never does.
class TcpMessages : public ::testing::TestWithParam<std::tuple<int, Mover, bool>> {};

TEST_P(TcpMessages, ArriveWholeAndInOrderInBothDirectionsAtOnce) {
  const auto [sockets, mover, checksum] = GetParam();
  Ends made = ends(sockets);
  made.one.checksum = checksum;
  Trouble trouble[2];
  Connection first(std::move(made.one), trouble[0].host());
  Connection second(std::move(made.other), trouble[1].host());
  const std::vector<size_t> sizes = {0, 1, 31, 64 << 10, (64 << 10) + 1, 3000001, 5, 0, 999983};
  const auto run = [&, way = mover](Connection& connection, unsigned own, unsigned theirs) {
    std::vector<std::string> sent;
    std::vector<std::string> received;
    for (size_t i = 0; i < sizes.size(); ++i) {
      sent.push_back(random_bytes(sizes[i], own + static_cast<unsigned>(i)));
      received.emplace_back(sizes[i] + 3, '\0');
    }
    // Some are asked for before they come, some after.
    std::vector<uint64_t> asked;
    std::vector<uint64_t> posted;
    for (size_t i = 0; i < sizes.size(); ++i) {
      posted.push_back(connection.send(sent[i].data(), sizes[i], way));
      if (i % 3 == 2) {
        for (size_t k = asked.size(); k <= i; ++k) {
          asked.push_back(connection.receive(received[k].data(), received[k].size(), way));
        }
      }
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_EQ(connection.wait_received(asked[i], within(20000)), sizes[i]);
      received[i].resize(sizes[i]);
      EXPECT_TRUE(received[i] == random_bytes(sizes[i], theirs + static_cast<unsigned>(i))) << i;
      connection.wait_sent(posted[i], within(20000));
    }
  };
  std::thread thread([&] { run(second, 500, 100); });
  run(first, 100, 500);
  thread.join();
  EXPECT_EQ(trouble[0].reason + trouble[1].reason, "");
}

INSTANTIATE_TEST_SUITE_P(Over,
                         TcpMessages,
                         ::testing::Combine(::testing::Values(1, 4),
                                            ::testing::Values(Mover::kCaller, Mover::kReactor),
                                            ::testing::Bool()));

// One half of a message of 16 bytes, as a peer sends it that adds checksums.
std::string checked_half(uint64_t offset) {
  StripeHeader header{StripeHeader::kMagic, 8, 0, offset, 16, 1, 0};
  header.checksum = checksum_of(header, "12345678");
  std::string stripe(sizeof header, '\0');
  std::memcpy(stripe.data(), &header, sizeof header);
  stripe += "12345678";
  return stripe;
}

TEST(TcpChecksum, LetsIntactMessagesThrough) {
  Played peer(1);
  std::string buffer(16, '\0');
  const uint64_t number = peer.connection->receive(buffer.data(), 16, Mover::kCaller);
  peer.put_raw(0, checked_half(8) + checked_half(0));
  EXPECT_EQ(peer.connection->wait_received(number, within(5000)), 16U);
  EXPECT_EQ(buffer, "1234567812345678");
}

TEST(TcpChecksum, NamesTheDamagedBytes) {
  // The low byte of the header's `offset`, of the checksum, and a byte of the data.
  for (const size_t damaged : {offsetof(StripeHeader, offset),
                               offsetof(StripeHeader, checksum),
                               sizeof(StripeHeader) + 2}) {
    Played peer(1);
    std::string buffer(16, '\0');
    const uint64_t number = peer.connection->receive(buffer.data(), 16, Mover::kCaller);
    std::string stripe = checked_half(0);
    stripe[damaged] ^= 1;
    peer.put_raw(0, stripe);
    EXPECT_THAT(peer.error_of_wait(number),
                AllOf(HasSubstr("rank 1 (its address)"),
                      HasSubstr("message #0 of 16 bytes"),
                      HasSubstr("do not match their checksum")));
  }
}

// RFC 3720, B.4, and the usual check value.
TEST(Crc32c, AgreesWithPublishedValues) {
  for (const auto& crc : {crc32c, crc32c_by_tables}) {
    EXPECT_EQ(crc("123456789", 9, 0), 0xe3069283U);
    EXPECT_EQ(crc(std::string(32, '\0').data(), 32, 0), 0x8a9136aaU);
    EXPECT_EQ(crc(std::string(32, '\xff').data(), 32, 0), 0x62a8ab43U);
  }
}

TEST(Crc32c, IsTheSameBothWaysAndInPieces) {
  const std::string bytes = random_bytes(5000, 3);
  for (const size_t first : {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{777}}) {
    const uint32_t whole = crc32c(bytes.data() + first, bytes.size() - first);
    EXPECT_EQ(crc32c_by_tables(bytes.data() + first, bytes.size() - first), whole);
    const uint32_t head = crc32c(bytes.data() + first, 100);
    EXPECT_EQ(crc32c(bytes.data() + first + 100, bytes.size() - first - 100, head), whole);
  }
}

TEST(TcpStriping, GivesEverySocketItsPart) {
  Played peer(4);
  // More than three sockets hold while nobody reads: whichever is served first, all get a part.
  const std::string message = random_bytes(64 << 20, 1);
  const uint64_t number = peer.connection->send(message.data(), message.size(), Mover::kReactor);
  for (const auto& socket : peer.data) {
    pollfd readable{.fd = socket.get(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(poll(&readable, 1, 10'000), 1);
  }
  std::string whole(message.size(), '\0');
  std::vector<size_t> carried(4);
  std::vector<std::string> streams(4);
  for (size_t got = 0; got < message.size();) {
    for (size_t i = 0; i < 4; ++i) {
      std::string& stream = streams[i];
      char buffer[64 << 10];
      const ssize_t bytes = recv(peer.data[i].get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (bytes > 0) stream.append(buffer, static_cast<size_t>(bytes));
      StripeHeader header;
      if (stream.size() < sizeof header) continue;
      std::memcpy(&header, stream.data(), sizeof header);
      ASSERT_EQ(fault_of(header), "");
      ASSERT_EQ(header.total, message.size());
      if (stream.size() < sizeof header + header.bytes) continue;
      whole.replace(header.offset, header.bytes, stream, sizeof header, header.bytes);
      stream.erase(0, sizeof header + header.bytes);
      carried[i] += header.bytes;
      got += header.bytes;
    }
  }
  EXPECT_TRUE(whole == message);
  EXPECT_THAT(carried, ::testing::Each(::testing::Gt(0U)));
  peer.connection->wait_sent(number, within(5000));
}

TEST(TcpParking, KeepsALaterMessageUntilItIsAskedFor) {
  for (const Mover mover : {Mover::kCaller, Mover::kReactor}) {
    Played peer(2);
    // Message 1 comes whole on socket B before A brings the rest of message 0.
    peer.put(0, 0, 0, 6, "abc");
    peer.put(1, 1, 0, 4, "late");
    std::string first(6, '.');
    const uint64_t number = peer.connection->receive(first.data(), first.size(), mover);
    EXPECT_THAT(peer.error_of_wait(number, 50), HasSubstr("timed out"));
    EXPECT_EQ(first, "abc...");
    peer.put(0, 0, 3, 6, "def");
    EXPECT_EQ(peer.connection->wait_received(number, within(5000)), 6U);
    EXPECT_EQ(first, "abcdef");
    std::string second(4, '.');
    const uint64_t next = peer.connection->receive(second.data(), second.size(), mover);
    EXPECT_EQ(peer.connection->wait_received(next, within(5000)), 4U);
    EXPECT_EQ(second, "late");
  }
}

TEST(TcpParking, EndsForAMessageOfNoBytes) {
  Played peer(2);
  char byte = 0;
  // The reactor reads both headers while it looks for message 0.
  const uint64_t first = peer.connection->receive(&byte, 1, Mover::kReactor);
  peer.put(1, 1, 0, 0, "");
  peer.put(0, 0, 0, 1, "x");
  EXPECT_EQ(peer.connection->wait_received(first, within(5000)), 1U);
  peer.put(0, 2, 0, 0, "");
  for (int i = 0; i < 2; ++i) {
    const uint64_t next = peer.connection->receive(&byte, 0, Mover::kReactor);
    EXPECT_EQ(peer.connection->wait_received(next, within(5000)), 0U);
  }
}

struct Fault {
  const char* name;
  std::function<void(Played&)> play;
  const char* words;
};

class TcpFaults : public ::testing::TestWithParam<Fault> {};

TEST_P(TcpFaults, AreToldWithThePeersNameAndNothingIsWrittenPastTheBuffer) {
  for (const Mover mover : {Mover::kCaller, Mover::kReactor}) {
    Played peer(2);
    std::string buffer(16, '.');
    const uint64_t number = peer.connection->receive(buffer.data(), 8, mover);
    GetParam().play(peer);
    EXPECT_THAT(peer.error_of_wait(number),
                AllOf(HasSubstr("rank 1 (its address)"), HasSubstr(GetParam().words)));
    EXPECT_EQ(buffer.substr(8), std::string(8, '.'));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Of,
    TcpFaults,
    ::testing::Values(
        Fault{"Garbage", [](Played& peer) { peer.put_raw(0, random_bytes(64, 3)); }, "no stripe"},
        Fault{"TooLong",
              [](Played& peer) { peer.put(0, 0, 0, 9, "123456789"); },
              "9 bytes where 8 were expected"},
        Fault{"AnotherTotal",
              [](Played& peer) {
                peer.put(0, 0, 0, 8, "1234");
                peer.put(0, 0, 4, 6, "56");
              },
              "6 bytes where 8 were expected"},
        Fault{"PastTheEnd", [](Played& peer) { peer.put(0, 0, 6, 8, "1234"); }, "past the end"},
        Fault{"Twice",
              [](Played& peer) {
                peer.put(0, 0, 0, 8, "1234");
                peer.put(0, 0, 0, 8, "12345");
              },
              "twice"},
        Fault{"HugeStripe",
              [](Played& peer) {
                const StripeHeader header{StripeHeader::kMagic, 1U << 30, 0, 0, 1U << 30};
                peer.put_raw(0, {reinterpret_cast<const char*>(&header), sizeof header});
              },
              "a stripe of"},
        Fault{"ControlGarbage",
              [](Played& peer) {
                const std::string bytes = random_bytes(64, 4);
                ASSERT_GT(::send(peer.control.get(), bytes.data(), bytes.size(), 0), 0);
              },
              "no control word"},
        Fault{"Death", [](Played& peer) { peer.control.reset(); }, "died or was cut off"},
        Fault{"LosesAllDataSockets",
              [](Played& peer) { peer.data.clear(); },
              "closed its connection"}),
    [](const auto& info) { return info.param.name; });

TEST(TcpFarewell, LetsWhatWasSentArriveAndThenSaysWhoLeft) {
  Played peer(2);
  std::string buffer(8, '.');
  const uint64_t number = peer.connection->receive(buffer.data(), 8, Mover::kReactor);
  peer.say(ControlHeader::kBye, DPT_OK, "");
  peer.control.reset();
  peer.put(1, 0, 0, 8, "12345678");
  peer.data.clear();
  EXPECT_EQ(peer.connection->wait_received(number, within(5000)), 8U);
  EXPECT_EQ(buffer, "12345678");
  const uint64_t next = peer.connection->receive(buffer.data(), 8, Mover::kReactor);
  EXPECT_THAT(peer.error_of_wait(next),
              AllOf(HasSubstr("rank 1 (its address)"), HasSubstr("has left the group")));
  EXPECT_EQ(peer.trouble.reason, "");
}

TEST(TcpAbort, CarriesItsReason) {
  Played peer(1);
  peer.say(ControlHeader::kAbort, DPT_ERR_PEER_LOST, "rank 7 died elsewhere");
  EXPECT_THAT(peer.trouble.wait(),
              HasSubstr("rank 7 died elsewhere, told by rank 1 (its address)"));
  EXPECT_EQ(peer.trouble.status, DPT_ERR_PEER_LOST);
  peer.connection->abort(DPT_ERR_TIMEOUT, "my own reason");
  std::string heard;
  while (heard.find("my own reason") == std::string::npos) {
    char bytes[256];
    const ssize_t got = recv(peer.control.get(), bytes, sizeof bytes, 0);
    ASSERT_GT(got, 0);
    heard.append(bytes, static_cast<size_t>(got));
  }
}

TEST(TcpTimeout, TellsWhetherThePeerShowsLife) {
  Played peer(1);
  char byte = 0;
  const uint64_t number = peer.connection->receive(&byte, 1, Mover::kReactor);
  EXPECT_THAT(peer.error_of_wait(number, 100), AllOf(HasSubstr("rank 1"), HasSubstr("alive")));
  EXPECT_THAT(peer.error_of_wait(number, 2500), HasSubstr("stopped or frozen?"));
  std::string said;
  for (int i = 0; i < 50 && said.find("alive") == std::string::npos; ++i) {
    peer.say(ControlHeader::kBeat, DPT_OK, "");
    said = peer.error_of_wait(number, 200);
  }
  EXPECT_THAT(said, HasSubstr("alive"));
}

TEST(TcpCancel, LeavesMemoryAlone) {
  Played peer(1);
  std::string buffer(8, '.');
  peer.connection->receive(buffer.data(), 8, Mover::kReactor);
  peer.connection->cancel();
  peer.put(0, 0, 0, 8, "12345678");
  EXPECT_THAT(peer.error_of_wait(0, 300), HasSubstr("given up"));
  EXPECT_EQ(buffer, "........");
}

}  // namespace
}  // namespace dpt::testing
