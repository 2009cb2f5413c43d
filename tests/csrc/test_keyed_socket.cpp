// Strangers may send to a local socket: their datagrams take nobody's room and count for nothing.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <future>
#include <thread>

#include "bootstrap/hash_store.hpp"
#include "comm/invitations.hpp"
#include "other_user.hpp"
#include "transport/shm/keyed_socket.hpp"

namespace dpt::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Many times what the kernel keeps for a socket.
constexpr int kFlood = 2000;

UniqueFd plain_socket() {
  return UniqueFd(DPT_SYS_CHECK(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)));
}

bool send_to(const std::string& name, const std::string& text) {
  return send_local(plain_socket().get(), text, {}, MSG_DONTWAIT, name);
}

// Sends datagrams without the key, some as long as the key, until there is no room.
void flood(const std::string& name) {
  const UniqueFd from = plain_socket();
  for (int i = 0; i < kFlood; ++i) {
    if (!send_local(from.get(), std::string(i % 50, '0'), {}, MSG_DONTWAIT, name)) return;
  }
}

// Returns the next message if it is there already; it does not wait.
std::optional<LocalMessage> next(const KeyedSocket& socket) {
  if (!readable_within(socket.fd(), milliseconds(0))) return std::nullopt;
  return socket.receive();
}

TEST(KeyedSocket, TakesWhatBeginsWithItsKey) {
  const KeyedSocket socket = KeyedSocket::make();
  const KeyedSocket peer = KeyedSocket::make();
  const auto& [name, key] = socket.address();
  const std::string longest = key + std::string(100000, 'x');
  for (const std::string& text : {key, key + " and more", longest}) {
    ASSERT_TRUE(send_local(peer.fd(), text, {peer.fd()}, MSG_DONTWAIT, name));
    const std::optional<LocalMessage> received = next(socket);
    ASSERT_TRUE(received);
    EXPECT_EQ(received->text, text);
    EXPECT_EQ(received->from, peer.address().name);
    EXPECT_EQ(received->fds.size(), 1U);
  }
  std::string wrong = key;
  for (size_t i = 0; i < key.size(); ++i) {
    wrong[i] ^= 1;
    send_to(name, wrong);
    wrong[i] ^= 1;
    send_to(name, key.substr(0, i));
  }
  EXPECT_FALSE(readable_within(socket.fd(), milliseconds(0)));
  EXPECT_NE(peer.address().key, key);
}

TEST(KeyedSocket, HasRoomForAPeerWhateverAStrangerSends) {
  const KeyedSocket socket = KeyedSocket::make();
  const auto& [name, key] = socket.address();
  flood(name);
  if (geteuid() == 0) {
    Other stranger(kNobody, [&] {
      flood(name);
      return true;
    });
    EXPECT_TRUE(stranger.finished());
  }
  ASSERT_TRUE(send_to(name, key)) << std::strerror(errno);
  EXPECT_TRUE(next(socket));
  EXPECT_FALSE(next(socket));
}

// The store tells the key to who asks, and some sandboxes have no filters.
TEST(KeyedSocket, LeavesOutWhatAnotherUserSendsWithTheKey) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  const KeyedSocket socket = KeyedSocket::make();
  const auto& [name, key] = socket.address();
  for (const bool filters : {true, false}) {
    const int unused = 0;
    if (!filters) {
      ASSERT_EQ(setsockopt(socket.fd(), SOL_SOCKET, SO_DETACH_FILTER, &unused, sizeof unused), 0);
    }
    Other stranger(kNobody, [&] { return send_to(name, key); });
    EXPECT_TRUE(stranger.finished());
    if (!filters) send_to(name, "without the key");
    for (int sent = filters ? 1 : 2; sent > 0; --sent) {
      ASSERT_TRUE(readable_within(socket.fd(), milliseconds(0)));
      EXPECT_FALSE(socket.receive());
      EXPECT_EQ(errno, EAGAIN);
    }
    ASSERT_TRUE(send_to(name, key));
    EXPECT_TRUE(next(socket));
  }
}

TEST(Invitations, ComeThroughWhileAStrangerFloodsAListenerThatIsBusy) {
  HashStore store;
  std::promise<void> begun, flooded;
  std::promise<std::string> second;
  std::atomic<int> invited = 0;
  const std::string words = Invitations::instance().open(
      [&](const std::string& inviter) {
        if (++invited == 2) second.set_value(inviter);
        if (invited != 1) return;
        begun.set_value();
        flooded.get_future().wait_for(seconds(20));
      },
      store);
  const std::string name = words.substr(0, words.find(' '));
  const std::string number = words.substr(name.size() + 1);
  ASSERT_TRUE(send_to(name, number + " invite the first"));
  begun.get_future().wait_for(seconds(20));
  flood(name);
  EXPECT_TRUE(send_to(name, number + " invite the second")) << std::strerror(errno);
  flooded.set_value();
  std::future<std::string> inviter = second.get_future();
  ASSERT_EQ(inviter.wait_for(seconds(20)), std::future_status::ready);
  EXPECT_EQ(inviter.get(), "the second");
  Invitations::instance().close(words);
}

TEST(Invitations, LendTheirStoreWhileAStrangerFloodsBothSides) {
  HashStore lent, own;
  const std::string words = Invitations::instance().open([](const std::string&) {}, lent);
  std::atomic<bool> over = false;
  std::thread stranger([&] {
    while (!over) flood(words.substr(0, words.find(' ')));
  });
  LentStore store(words, own);
  for (int i = 0; i < 50; ++i) {
    store.set("key", std::to_string(i));
    EXPECT_EQ(lent.get("key", milliseconds(0)), std::to_string(i));
  }
  EXPECT_FALSE(own.get("key", milliseconds(0))) << "the lender seemed to have left";
  over = true;
  stranger.join();
  Invitations::instance().close(words);
}

}  // namespace
}  // namespace dpt::testing
