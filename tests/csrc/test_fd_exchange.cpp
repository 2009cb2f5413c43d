// Only processes of the same user, on either end, may pass memory over the abstract sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "base/error.hpp"
#include "other_user.hpp"
#include "transport/shm/fd_exchange.hpp"

namespace dpt::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

WaitContext within(std::chrono::milliseconds limit) {
  return {Deadline(limit), [] { return std::string("the test"); }, nullptr};
}

// Asks for a connection as a peer does; true once the listening side has hung up.
bool is_turned_away(const std::string& address) {
  const UniqueFd connection = connect_abstract(address, within(seconds(20)));
  try {
    await_acceptance(connection, within(seconds(20)));
  } catch (const Error& error) {
    return error.status() == DPT_ERR_SYSTEM;
  }
  return false;
}

// Another process of user `uid` listens and serves the first who asks, whoever that is, while
// `then` gets the address.
void with_listener(uid_t uid, const std::function<void(const std::string&)>& then) {
  int names[2];
  int ends[2];
  DPT_SYS_CHECK(pipe(names));
  DPT_SYS_CHECK(pipe(ends));
  UniqueFd end_reader(ends[0]);
  UniqueFd end_writer(ends[1]);
  const UniqueFd name_reader(names[0]);
  UniqueFd name_writer(names[1]);
  Other server(uid, [&] {
    end_writer.reset();
    std::string name;
    const KeyedSocket listener = listen_abstract(&name);
    DPT_SYS_CHECK(write(name_writer.get(), name.data(), name.size()));
    name_writer.reset();
    const std::optional<LocalMessage> asked = receive_local(listener.fd(), 1000, 0);
    const bool served = asked && asked->fds.size() == 1 &&
                        send_local(asked->fds.front().get(), "accepted", {}, MSG_DONTWAIT);
    char byte = 0;
    return read(end_reader.get(), &byte, 1) == 0 && served;
  });
  name_writer.reset();
  char name[200];
  const ssize_t length = read(name_reader.get(), name, sizeof name);
  if (length > 0) then(std::string(name, static_cast<size_t>(length)));
  end_writer.reset();
  EXPECT_TRUE(server.finished());
  EXPECT_GT(length, 0);
}

TEST(AbstractSocket, LetsTheSameUserInOnBothEnds) {
  std::string address;
  const KeyedSocket listener = listen_abstract(&address);
  Other client(geteuid(), [&] {
    const UniqueFd socket = connect_abstract(address, within(seconds(20)));
    await_acceptance(socket, within(seconds(20)));
    send_fds(socket, "hello", {});
    return true;
  });
  const UniqueFd accepted = accept_within(listener, seconds(20));
  ASSERT_GE(accepted.get(), 0);
  EXPECT_EQ(receive_fds(accepted, within(seconds(20))).text, "hello");
  EXPECT_TRUE(client.finished());
  with_listener(geteuid(), [](const std::string& theirs) {
    const UniqueFd socket = connect_abstract(theirs, within(seconds(20)));
    EXPECT_NO_THROW(await_acceptance(socket, within(seconds(20))));
  });
}

TEST(AbstractSocket, TurnsAwayAClientOfAnotherUserAndGoesOnServing) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  std::string address;
  const KeyedSocket listener = listen_abstract(&address);
  Other stranger(kNobody, [&] { return is_turned_away(address); });
  EXPECT_LT(accept_within(listener, seconds(1)).get(), 0);
  EXPECT_TRUE(stranger.finished()) << "it was not hung up on";

  Other client(geteuid(),
               [&] { return connect_abstract(address, within(seconds(20))).get() >= 0; });
  EXPECT_TRUE(client.finished());
  EXPECT_LT(accept_within(listener, seconds(1)).get(), 0) << "it has left";
  Other patient(geteuid(), [&] { return !is_turned_away(address); });
  EXPECT_GE(accept_within(listener, seconds(20)).get(), 0);
  EXPECT_TRUE(patient.finished());
}

TEST(AbstractSocket, RefusesAServerOfAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  with_listener(kNobody, [](const std::string& address) {
    const UniqueFd socket = connect_abstract(address, within(seconds(20)));
    try {
      await_acceptance(socket, within(seconds(20)));
      FAIL() << "connected to another user's socket";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), DPT_ERR_SYSTEM);
      EXPECT_THAT(error.what(), HasSubstr("belongs to another user"));
    }
  });
}

// Nothing that a stranger sends, or opens, takes the room of a peer's request.
TEST(AbstractSocket, IsNeverFullOfStrangers) {
  std::string address;
  const KeyedSocket listener = listen_abstract(&address);
  const std::string name = address.substr(0, address.find('/'));
  const UniqueFd stranger(DPT_SYS_CHECK(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)));
  for (int i = 0; i < 2000; ++i) {
    ASSERT_TRUE(send_local(stranger.get(), "hello", {stranger.get()}, MSG_DONTWAIT, name));
  }
  const UniqueFd connection = connect_abstract(address, within(seconds(0)));
  EXPECT_GE(accept_within(listener, seconds(0)).get(), 0);
  EXPECT_NO_THROW(await_acceptance(connection, within(seconds(0))));
}

TEST(AbstractSocket, WaitsForRoomAmongItsPeersAndNoLongerThanItsLimit) {
  std::string address;
  KeyedSocket listener = listen_abstract(&address);
  std::vector<UniqueFd> waiting;
  const auto ask_until_full = [&] {
    for (;;) waiting.push_back(connect_abstract(address, within(std::chrono::milliseconds(150))));
  };
  try {
    ask_until_full();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), DPT_ERR_TIMEOUT);
    EXPECT_THAT(error.what(), HasSubstr("the test: a local rank did not answer in time"));
  }
  const size_t asked = waiting.size();
  std::thread last([&] { waiting.push_back(connect_abstract(address, within(seconds(20)))); });
  for (size_t i = 0; i <= asked; ++i) EXPECT_GE(accept_within(listener, seconds(20)).get(), 0);
  last.join();
  for (const UniqueFd& each : waiting) EXPECT_NO_THROW(await_acceptance(each, within(seconds(20))));
  waiting.push_back(connect_abstract(address, within(seconds(20))));
  listener.reset();
  EXPECT_THROW(await_acceptance(waiting.back(), within(seconds(20))), Error);
  EXPECT_THROW(connect_abstract(address, within(seconds(20))), Error);
}

}  // namespace
}  // namespace dpt::testing
