// Only processes of the same user, on either end, may pass memory over the abstract sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>

#include "base/error.hpp"
#include "transport/shm/fd_exchange.hpp"

namespace dpt::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr uid_t kNobody = 65534;
constexpr int kTimeoutMs = 20000;

// A process that does `work` as user `uid`; its end is waited for.
class Other {
 public:
  Other(uid_t uid, const std::function<bool()>& work) {
    pid_ = DPT_SYS_CHECK(fork());
    if (pid_ > 0) return;
    bool done = false;
    try {
      // The system call itself: the C library would ask all threads, which a child has not.
      done = syscall(SYS_setresuid, uid, uid, uid) == 0 && work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "the other process: %s\n", error.what());
    }
    _exit(done ? 0 : 1);
  }
  ~Other() {
    if (pid_ > 0) finished();
  }
  bool finished() {
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

 private:
  pid_t pid_;
};

// Connects without asking who listens; true once the listening side has hung up.
bool is_turned_away(const std::string& name) {
  const UniqueFd socket(DPT_SYS_CHECK(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  DPT_SYS_CHECK(connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length));
  pollfd entry{socket.get(), POLLIN, 0};
  char byte = 0;
  return poll(&entry, 1, kTimeoutMs) == 1 && recv(socket.get(), &byte, 1, 0) <= 0;
}

// Listens in another process of user `uid` while `then` gets the name.
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
    const UniqueFd listener = listen_abstract(&name);
    DPT_SYS_CHECK(write(name_writer.get(), name.data(), name.size()));
    name_writer.reset();
    char byte = 0;
    return read(end_reader.get(), &byte, 1) == 0;
  });
  name_writer.reset();
  char name[sizeof(sockaddr_un)];
  const ssize_t length = read(name_reader.get(), name, sizeof name);
  if (length > 0) then(std::string(name, static_cast<size_t>(length)));
  end_writer.reset();
  EXPECT_TRUE(server.finished());
  EXPECT_GT(length, 0);
}

TEST(AbstractSocket, LetsTheSameUserInOnBothEnds) {
  std::string name;
  const UniqueFd listener = listen_abstract(&name);
  Other client(geteuid(), [&] {
    const UniqueFd socket = connect_abstract(name);
    send_fds(socket, "hello", {});
    return true;
  });
  const UniqueFd accepted = accept_within(listener, seconds(20));
  EXPECT_GE(accepted.get(), 0);
  EXPECT_TRUE(client.finished());
  with_listener(geteuid(),
                [](const std::string& theirs) { EXPECT_GE(connect_abstract(theirs).get(), 0); });
}

TEST(AbstractSocket, TurnsAwayAClientOfAnotherUserAndGoesOnServing) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  std::string name;
  const UniqueFd listener = listen_abstract(&name);
  Other stranger(kNobody, [&] { return is_turned_away(name); });
  EXPECT_LT(accept_within(listener, seconds(20)).get(), 0);
  EXPECT_TRUE(stranger.finished()) << "it was not hung up on";

  Other client(geteuid(), [&] { return connect_abstract(name).get() >= 0; });
  EXPECT_GE(accept_within(listener, seconds(20)).get(), 0);
  EXPECT_TRUE(client.finished());
}

TEST(AbstractSocket, RefusesAServerOfAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  with_listener(kNobody, [](const std::string& name) {
    try {
      connect_abstract(name);
      FAIL() << "connected to another user's socket";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), DPT_ERR_SYSTEM);
      EXPECT_THAT(error.what(), HasSubstr("belongs to another user"));
    }
  });
}

}  // namespace
}  // namespace dpt::testing
