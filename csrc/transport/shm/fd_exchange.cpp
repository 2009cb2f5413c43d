#include "transport/shm/fd_exchange.hpp"

#include <sys/socket.h>

#include <cerrno>
#include <thread>
#include <utility>

#include "base/error.hpp"

namespace dpt {
namespace {

constexpr size_t kMaxText = 512;
constexpr char kAccepted[] = "accepted";
// Between two looks whether a listener has room again.
constexpr std::chrono::milliseconds kPause{1};

// There is no room now, or too many descriptors are on their way: the receivers will take them.
bool may_be_sent_later() {
  return errno == EAGAIN || errno == EINTR || errno == ENOBUFS || errno == ETOOMANYREFS;
}

// Error(DPT_ERR_SYSTEM) when the peer closed.
std::optional<LocalMessage> receive_message(const UniqueFd& socket, int flags) {
  std::optional<LocalMessage> received = receive_local(socket.get(), kMaxText, flags);
  if (received && received->text.empty()) {
    throw Error(DPT_ERR_SYSTEM, "a local rank closed the connection while attaching");
  }
  return received;
}

LocalMessage await_message(const UniqueFd& socket, const WaitContext& wait) {
  while (!readable_within(socket.get(), wait.deadline.next_slice())) {
    wait.check();
    if (wait.deadline.expired()) {
      throw Error(DPT_ERR_TIMEOUT, wait.describe() + ": a local rank did not answer in time");
    }
  }
  std::optional<LocalMessage> received = receive_message(socket, 0);
  if (!received) throw_system_error("recvmsg");
  return std::move(*received);
}

}  // namespace

KeyedSocket listen_abstract(std::string* address) {
  KeyedSocket listener = KeyedSocket::make();
  *address = listener.address().name + "/" + listener.address().key;
  return listener;
}

UniqueFd accept_within(const KeyedSocket& listener, std::chrono::milliseconds slice) {
  const Deadline end(slice);
  do {
    if (!readable_within(listener.fd(), end.next_slice())) continue;
    std::optional<LocalMessage> request = listener.receive();
    if (!request || request->fds.size() != 1) continue;  // nobody of ours asks so
    UniqueFd connection = std::move(request->fds.front());
    // Else who asked has gone meanwhile.
    if (send_local(connection.get(), kAccepted, {}, MSG_DONTWAIT)) return connection;
  } while (!end.expired());
  return UniqueFd();
}

UniqueFd connect_abstract(const std::string& address, const WaitContext& wait) {
  const size_t border = address.find('/');
  if (border == std::string::npos) throw Error(DPT_ERR_SYSTEM, "a local rank has no address");
  int ends[2];
  DPT_SYS_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
  UniqueFd connection(ends[0]);
  const UniqueFd theirs(ends[1]);
  if (!ask_for_senders(connection.get())) throw_system_error("setsockopt(SO_PASSCRED)");
  const UniqueFd asking(DPT_SYS_CHECK(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)));
  auto next_check = std::chrono::steady_clock::now() + kWaitSlice;
  while (!send_local(asking.get(),
                     address.substr(border + 1),
                     {theirs.get()},
                     MSG_DONTWAIT,
                     address.substr(0, border))) {
    if (!may_be_sent_later()) throw_system_error("connecting to a local rank");
    if (std::chrono::steady_clock::now() >= next_check) {
      wait.check();
      next_check += kWaitSlice;
    }
    if (wait.deadline.expired()) {
      throw Error(DPT_ERR_TIMEOUT, wait.describe() + ": a local rank did not answer in time");
    }
    std::this_thread::sleep_for(kPause);
  }
  return connection;
}

void await_acceptance(const UniqueFd& connection, const WaitContext& wait) {
  const LocalMessage acceptance = await_message(connection, wait);
  if (!acceptance.is_of_this_user()) {
    throw Error(DPT_ERR_SYSTEM, "the group's socket belongs to another user");
  }
  if (acceptance.text != kAccepted) {
    throw Error(DPT_ERR_SYSTEM, "a local process sent a malformed greeting");
  }
}

void send_fds(const UniqueFd& socket, const std::string& text, const std::vector<int>& fds) {
  DPT_CHECK(text.size() <= kMaxText);
  if (!send_local(socket.get(), text, fds, 0)) throw_system_error("sendmsg");
}

bool try_send_fds(const UniqueFd& socket, const std::string& text, const std::vector<int>& fds) {
  DPT_CHECK(text.size() <= kMaxText);
  if (send_local(socket.get(), text, fds, MSG_DONTWAIT)) return true;
  if (may_be_sent_later()) return false;
  throw_system_error("sendmsg");
}

Received receive_fds(const UniqueFd& socket, const WaitContext& wait) {
  LocalMessage received = await_message(socket, wait);
  return {std::move(received.text), std::move(received.fds)};
}

std::optional<Received> try_receive_fds(const UniqueFd& socket) {
  std::optional<LocalMessage> received = receive_message(socket, MSG_DONTWAIT);
  if (received) return Received{std::move(received->text), std::move(received->fds)};
  if (errno == EAGAIN || errno == EINTR) return std::nullopt;
  throw_system_error("recvmsg");
}

}  // namespace dpt
