// Tests of who may connect: the cryptography against published vectors, each side of the handshake
// against wrong ones, and dialling among strangers.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <thread>

#include "base/error.hpp"
#include "rank_threads.hpp"
#include "transport/tcp/dialing.hpp"
#include "transport/tcp/handshake.hpp"
#include "transport/tcp/sha256.hpp"

namespace dpt::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::string hex(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

// FIPS 180-4 examples, and lengths around a block's end.
TEST(Sha256, AgreesWithPublishedVectors) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::string(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// RFC 4231, cases 1, 2 and 6 (a key longer than a block).
TEST(Sha256, AgreesWithPublishedVectorsOfHmac) {
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                            "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Sha256, ComparesWholeDigests) {
  Digest one = sha256("x");
  Digest other = one;
  EXPECT_TRUE(equal_in_constant_time(one, other));
  other[31] ^= 1;
  EXPECT_FALSE(equal_in_constant_time(one, other));
}

Acquaintance acquaintance(uint32_t me, const std::string& secret = "the group's secret") {
  return {secret, "0123456789abcdef0123456789abcdef", me, 4, 3};
}

struct Pair {
  UniqueFd client;
  UniqueFd server;
  Pair() {
    int fds[2];
    DPT_SYS_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds));
    client = UniqueFd(fds[0]);
    server = UniqueFd(fds[1]);
  }
};

using State = Handshake::State;

// Lets both sides go on until both are done or one fails; what it said.
std::string shake(Handshake& client, Handshake& server, const Pair& pair) {
  try {
    for (int round = 0; round < 10; ++round) {
      const State one = client.advance(pair.client.get());
      const State other = server.advance(pair.server.get());
      if (one == State::kDone && other == State::kDone) return "";
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "no end";
}

TEST(TcpHandshake, IntroducesTheClient) {
  const Pair pair;
  Handshake client = Handshake::client(acquaintance(2), 1, 2);
  Handshake server = Handshake::server(acquaintance(1));
  EXPECT_EQ(shake(client, server, pair), "");
  EXPECT_EQ(server.peer(), 2U);
  EXPECT_EQ(server.socket(), 2U);
  EXPECT_EQ(client.peer(), 1U);
}

TEST(TcpHandshake, RefusesAnotherSecretOnBothSides) {
  const Pair pair;
  Handshake client = Handshake::client(acquaintance(2, "another secret"), 1, 0);
  Handshake server = Handshake::server(acquaintance(1));
  EXPECT_THAT(shake(client, server, pair), HasSubstr("does not know the group's secret"));

  // A client that goes on regardless proves nothing to the server either.
  const Pair other;
  Handshake honest = Handshake::server(acquaintance(1));
  Hello hello;
  const std::string group = acquaintance(1).group;
  std::copy(group.begin(), group.end(), hello.group.begin());
  hello.from = 2;
  hello.to = 1;
  ASSERT_EQ(send(other.client.get(), &hello, sizeof hello, 0), ssize_t{sizeof hello});
  const std::string forged(32, 'x');
  ASSERT_EQ(send(other.client.get(), forged.data(), forged.size(), 0), ssize_t{32});
  EXPECT_THROW(honest.advance(other.server.get()), Error);
}

TEST(TcpHandshake, RefusesOtherGroupsRanksAndSockets) {
  for (const auto& [to, socket] : {std::pair{3U, 0U}, std::pair{1U, 3U}}) {
    const Pair pair;
    Handshake client = Handshake::client(acquaintance(2), to, socket);
    Handshake server = Handshake::server(acquaintance(1));
    EXPECT_THAT(shake(client, server, pair), HasSubstr("another group or rank"));
  }
  const Pair pair;
  Acquaintance elsewhere = acquaintance(2);
  elsewhere.group = "another group's meeting";
  Handshake client = Handshake::client(elsewhere, 1, 0);
  Handshake server = Handshake::server(acquaintance(1));
  EXPECT_THAT(shake(client, server, pair), HasSubstr("another group or rank"));
}

TEST(TcpHandshake, NamesBothVersionsOnBothSides) {
  const Pair pair;
  Hello hello;
  hello.version = kTcpVersion + 1;
  ASSERT_GT(send(pair.client.get(), &hello, sizeof hello, 0), 0);
  Handshake server = Handshake::server(acquaintance(1));
  const std::string version = std::to_string(kTcpVersion + 1);
  try {
    server.advance(pair.server.get());
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("version " + version), HasSubstr("every node")));
  }
  // The server says its own version before it hangs up.
  char prefix[8];
  ASSERT_EQ(recv(pair.client.get(), prefix, sizeof prefix, 0), ssize_t{sizeof prefix});
  EXPECT_EQ(prefix[4], kTcpVersion);

  // So does one that is called, whose words may be fewer than this client expects.
  const Pair other;
  Handshake client = Handshake::client(acquaintance(2), 1, 0);
  EXPECT_EQ(client.advance(other.client.get()), State::kReading);
  ASSERT_EQ(send(other.server.get(), &hello, 7, 0), 7);
  EXPECT_EQ(client.advance(other.client.get()), State::kReading);
  ASSERT_EQ(send(other.server.get(), reinterpret_cast<const char*>(&hello) + 7, 1, 0), 1);
  try {
    client.advance(other.client.get());
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("version " + version),
                      HasSubstr("this one " + std::to_string(kTcpVersion)),
                      HasSubstr("install the same version of deepytorch on every node")));
  }
}

TEST(TcpHandshake, RefusesGarbageAndWaitsForTheRestOfAHalf) {
  const Pair pair;
  Handshake server = Handshake::server(acquaintance(1));
  EXPECT_EQ(server.advance(pair.server.get()), State::kReading);
  const std::string garbage = "GET / HTTP/1.1\r\n";
  ASSERT_GT(send(pair.client.get(), garbage.data(), garbage.size(), 0), 0);
  EXPECT_THROW(server.advance(pair.server.get()), Error);

  const Pair other;
  Handshake patient = Handshake::server(acquaintance(1));
  const Hello hello;
  ASSERT_EQ(send(other.client.get(), &hello, 20, 0), 20);
  EXPECT_EQ(patient.advance(other.server.get()), State::kReading);
}

UniqueFd connect_to(const Listener& listener) {
  UniqueFd fd(socket(listener.address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  DPT_SYS_CHECK(connect(fd.get(), listener.address.get(), listener.address.length));
  return fd;
}

struct Dialed {
  std::map<int, std::vector<UniqueFd>> sockets;
  std::string error;
};

Dialed dial_as(uint32_t me,
               uint32_t peer,
               const std::vector<Listener>& own,
               const std::vector<Listener>& theirs,
               milliseconds limit = milliseconds(20000),
               const std::string& secret = "the group's secret") {
  const TcpSettings settings;
  std::vector<Endpoint> endpoints;
  for (const Listener& each : theirs) endpoints.push_back({each.address, each.interface.name});
  const Dialing dialing{acquaintance(me, secret),
                        own,
                        {{static_cast<int>(peer), endpoints}},
                        {{static_cast<int>(peer), "rank " + std::to_string(peer)}},
                        settings,
                        [] {}};
  Dialed result;
  try {
    result.sockets = dial(dialing, limit);
  } catch (const Error& error) {
    result.error = error.what();
  }
  return result;
}

std::vector<Listener> listeners(const std::vector<std::string>& ips) {
  std::vector<Listener> made;
  for (const std::string& ip : ips) made.push_back(listen_on({"lo", ip, 8}, TcpSettings{}));
  return made;
}

// Not on every interface of the machine: 127.0.0.2 is another address of the same one.
TEST(TcpDialing, ListensOnItsInterfaceAlone) {
  const Listener listener = std::move(listeners({"127.0.0.1"})[0]);
  EXPECT_THAT(listener.address.describe(), HasSubstr("127.0.0.1:"));
  for (const std::string ip : {"127.0.0.1", "127.0.0.2"}) {
    const SocketAddress address = SocketAddress::parse(ip, listener.address.port());
    const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(fd.get(), address.get(), address.length) == 0, ip == "127.0.0.1") << ip;
  }
}

TEST(TcpDialing, FindsThePeerAmongStrangers) {
  const std::vector<Listener> lower = listeners({"127.0.0.1"});
  const std::vector<Listener> upper = listeners({"127.0.0.1"});
  // One that says nothing, one that says nonsense, one that begins well and stops.
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 3; ++i) strangers.push_back(connect_to(lower[0]));
  const std::string garbage(500, 'g');
  ASSERT_GT(send(strangers[1].get(), garbage.data(), garbage.size(), 0), 0);
  const Hello hello;
  ASSERT_GT(send(strangers[2].get(), &hello, 40, 0), 0);
  Dialed one;
  Dialed other;
  std::thread thread([&] { one = dial_as(0, 3, lower, upper); });
  other = dial_as(3, 0, upper, lower);
  thread.join();
  EXPECT_EQ(one.error + other.error, "");
  ASSERT_THAT(one.sockets[3], SizeIs(3));
  // A peer that is stopped takes no data, which is no reason to give it up.
  for (size_t i = 0; i < 3; ++i) {
    unsigned limit_ms = 0;
    socklen_t length = sizeof limit_ms;
    const int fd = one.sockets[3][i].get();
    ASSERT_EQ(getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, &length), 0);
    EXPECT_EQ(limit_ms != 0, i == 2) << "only the control socket, which is the last";
  }
  // The sockets of the two sides belong together in order.
  for (size_t i = 0; i < 3; ++i) {
    const char sent = static_cast<char>('a' + i);
    ASSERT_EQ(send(one.sockets[3][i].get(), &sent, 1, 0), 1);
    pollfd entry{other.sockets[0][i].get(), POLLIN, 0};
    ASSERT_EQ(poll(&entry, 1, 5000), 1);
    char received = 0;
    ASSERT_EQ(recv(other.sockets[0][i].get(), &received, 1, 0), 1);
    EXPECT_EQ(received, sent);
  }
}

size_t connections_waiting(const Listener& listener) {
  tcp_info info{};
  socklen_t length = sizeof info;
  DPT_SYS_CHECK(getsockopt(listener.fd.get(), IPPROTO_TCP, TCP_INFO, &info, &length));
  return info.tcpi_unacked;  // of a listening socket
}

void await_callers(const Listener& listener, size_t wanted) {
  const auto end = std::chrono::steady_clock::now() + milliseconds(20000);
  while (connections_waiting(listener) < wanted && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

// More strangers than a rank lets in come behind the peer, and say nothing.
TEST(TcpDialing, IsNotKeptFromThePeerByACrowdOfStrangers) {
  const std::vector<Listener> lower = listeners({"127.0.0.1"});
  const std::vector<Listener> upper = listeners({"127.0.0.1"});
  Dialed other;
  std::thread thread([&] { other = dial_as(3, 0, upper, lower); });
  await_callers(lower[0], 3);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 600; ++i) strangers.push_back(connect_to(lower[0]));
  const Dialed one = dial_as(0, 3, lower, upper);
  thread.join();
  EXPECT_EQ(one.error + other.error, "");
}

// A crowd pushes out who has not said anything yet, the peer among them: then it calls again.
TEST(TcpDialing, CallsAgainWhenItWasNotHeard) {
  const std::vector<Listener> lower = listeners({"127.0.0.1"});
  const std::vector<Listener> upper = listeners({"127.0.0.1"});
  Dialed other;
  std::thread thread([&] { other = dial_as(3, 0, upper, lower); });
  for (int closed = 0; closed < 7; ++closed) {
    await_callers(lower[0], 1);
    UniqueFd(accept(lower[0].fd.get(), nullptr, nullptr)).reset();
  }
  const Dialed one = dial_as(0, 3, lower, upper);
  thread.join();
  EXPECT_EQ(one.error + other.error, "");
}

TEST(TcpDialing, UsesAllInterfacesOfBothSides) {
  const std::vector<Listener> lower = listeners({"127.0.0.1", "127.0.0.2"});
  const std::vector<Listener> upper = listeners({"127.0.0.3", "127.0.0.4"});
  Dialed one;
  std::thread thread([&] { one = dial_as(0, 3, lower, upper); });
  const Dialed other = dial_as(3, 0, upper, lower);
  thread.join();
  EXPECT_EQ(one.error + other.error, "");
  std::vector<std::string> ways;
  for (const UniqueFd& fd : one.sockets[3]) {
    SocketAddress own;
    SocketAddress theirs;
    own.length = theirs.length = sizeof own.storage;
    getsockname(fd.get(), own.get(), &own.length);
    getpeername(fd.get(), theirs.get(), &theirs.length);
    ways.push_back(own.ip() + " " + theirs.ip());
  }
  EXPECT_THAT(
      ways,
      ::testing::ElementsAre("127.0.0.1 127.0.0.3", "127.0.0.2 127.0.0.4", "127.0.0.1 127.0.0.3"));
}

TEST(TcpDialing, WorksOverIpv6) {
  std::vector<Listener> lower;
  try {
    lower = listeners({"::1"});
  } catch (const Error& error) {
    GTEST_SKIP() << "no IPv6 here: " << error.what();
  }
  const std::vector<Listener> upper = listeners({"::1"});
  Dialed one;
  std::thread thread([&] { one = dial_as(0, 3, lower, upper); });
  const Dialed other = dial_as(3, 0, upper, lower);
  thread.join();
  EXPECT_EQ(one.error + other.error, "");
}

TEST(TcpDialing, NamesPeerAndInterfaceWhenItFails) {
  const std::vector<Listener> lower = listeners({"127.0.0.1"});
  const std::vector<Listener> upper = listeners({"127.0.0.1"});
  Dialed one;
  const milliseconds limit(2000);
  std::thread thread([&] { one = dial_as(0, 3, lower, upper, limit); });
  const Dialed other = dial_as(3, 0, upper, lower, limit, "another secret");
  thread.join();
  EXPECT_THAT(other.error,
              AllOf(HasSubstr("rank 0"), HasSubstr("by lo"), HasSubstr("the group's secret")));
  EXPECT_THAT(one.error,
              AllOf(HasSubstr("rank 3 did not connect"), HasSubstr("DEEPYTORCH_IFNAME")));

  std::vector<Listener> closed = listeners({"127.0.0.1"});
  closed[0].fd.reset();
  EXPECT_THAT(dial_as(3, 0, upper, closed, limit).error,
              AllOf(HasSubstr("rank 0"), HasSubstr("refused"), HasSubstr("by lo")));
}

// Answers one caller as a rank of another version does, having read so much of what it says.
void answer_in_version(const Listener& listener, uint16_t version, size_t bytes_read) {
  pollfd called{listener.fd.get(), POLLIN, 0};
  poll(&called, 1, 10000);  // the listener does not block
  const UniqueFd fd(DPT_SYS_CHECK(accept(listener.fd.get(), nullptr, nullptr)));
  Hello hello;
  recv(fd.get(), &hello, bytes_read, MSG_WAITALL);
  hello.version = version;
  send(fd.get(), &hello, 8, MSG_NOSIGNAL);  // and hangs up
}

// Also where it hangs up on words it has not read, which resets the connection.
TEST(TcpDialing, NamesPeerInterfaceAndVersionsWhenAnotherVersionAnswers) {
  for (const size_t bytes_read : {sizeof(Hello), size_t{8}}) {
    const std::vector<Listener> lower = listeners({"127.0.0.1"});
    const std::vector<Listener> upper = listeners({"127.0.0.1"});
    std::thread old([&] { answer_in_version(lower[0], kTcpVersion - 1, bytes_read); });
    const auto start = std::chrono::steady_clock::now();
    const Dialed result = dial_as(3, 0, upper, lower);
    old.join();
    EXPECT_THAT(result.error,
                AllOf(HasSubstr("rank 0 (" + lower[0].address.describe() + " by lo, from lo)"),
                      HasSubstr("speaks version " + std::to_string(kTcpVersion - 1)),
                      HasSubstr("this one " + std::to_string(kTcpVersion)),
                      HasSubstr("install the same version of deepytorch on every node")));
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(10000)) << "no time limit";
  }
}

// The rank that is called turns such a caller away and waits for the one it knows.
TEST(TcpDialing, GoesOnWaitingWhenAnotherVersionCalls) {
  const std::vector<Listener> lower = listeners({"127.0.0.1"});
  const std::vector<Listener> upper = listeners({"127.0.0.1"});
  const UniqueFd old = connect_to(lower[0]);
  Hello hello;
  hello.version = kTcpVersion - 1;
  ASSERT_GT(send(old.get(), &hello, sizeof hello, 0), 0);
  Dialed one;
  std::thread thread([&] { one = dial_as(0, 3, lower, upper); });
  const Dialed other = dial_as(3, 0, upper, lower);
  thread.join();
  EXPECT_EQ(one.error + other.error, "");
}

Route route_by(const std::vector<std::pair<std::string, std::string>>& sources) {
  return [sources](const std::string& ip) -> std::optional<std::string> {
    for (const auto& [prefix, source] : sources) {
      if (ip.starts_with(prefix)) return source;
    }
    return std::nullopt;
  };
}

TEST(TcpInterfaces, PicksTheOneThatLeadsToTheOtherNodes) {
  const std::vector<Interface> own = {{"lo", "127.0.0.1", 8},
                                      {"docker0", "172.17.0.1", 16},
                                      {"eth0", "192.168.1.1", 24},
                                      {"ib0", "10.0.0.1", 24}};
  const std::vector<Interface> other = {
      {"lo", "127.0.0.1", 8}, {"docker0", "172.17.0.1", 16}, {"ib0", "10.0.0.2", 24}};
  const Route route = route_by(
      {{"127.", "127.0.0.1"}, {"172.17.", "172.17.0.1"}, {"10.", "10.0.0.1"}, {"", "192.168.1.1"}});
  EXPECT_EQ(interface_towards(own, {other}, route)->name, "ib0");
  // Not in one network, but with a route.
  EXPECT_EQ(interface_towards(own, {{{"eth1", "8.8.8.8", 24}}}, route)->name, "eth0");
  // An interface that leads to all of them is better than a network shared with one.
  EXPECT_EQ(interface_towards(
                own, {{{"ib0", "10.0.0.2", 24}, {"e", "9.9.9.9", 8}}, {{"e", "9.9.9.8", 8}}}, route)
                ->name,
            "eth0");
  EXPECT_FALSE(interface_towards(own, {{{"docker0", "172.17.0.1", 16}}}, route));
}

TEST(TcpInterfaces, AreListedAndNamed) {
  const std::vector<Interface> all = list_interfaces();
  const auto loopback = std::find(all.begin(), all.end(), Interface{"lo", "127.0.0.1", 8});
  ASSERT_NE(loopback, all.end());
  EXPECT_EQ(parse_interfaces(serialize(all)), all);
  EXPECT_EQ(select_interfaces(all, {"lo"}).at(0).ip, "127.0.0.1");
  EXPECT_EQ(source_towards("127.0.0.1"), "127.0.0.1");
  try {
    select_interfaces(all, {"nosuch7"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("nosuch7"), HasSubstr("lo")));
  }
}

}  // namespace
}  // namespace dpt::testing
