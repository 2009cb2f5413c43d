#include "comm/invitations.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <sstream>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/thread.hpp"
#include "base/unique_fd.hpp"
#include "bootstrap/exchange.hpp"

namespace dpt {
namespace {

// The address of a process that can't listen. Nobody can invite it: its peers' messages wait for
// its own first operation.
const std::string kNoAddress = "-";

constexpr socklen_t kNameOffset = offsetof(sockaddr_un, sun_path) + 1;
constexpr size_t kMostBytes = 128 << 10;  // of a datagram
// How long a question waits for its answer before it is asked again.
constexpr std::chrono::milliseconds kAnswerTime{100};
// The lender answers at once, or has left.
constexpr std::chrono::milliseconds kLenderTime{1000};

// A datagram socket on a free abstract address that the kernel picks; -1 when there is none. Any
// user of the machine may send there, so the kernel is asked who did.
int open_socket() {
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0 &&
      bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) == 0) {
    return fd;
  }
  ::close(fd);
  return -1;
}

struct Datagram {
  bool has_failed = false;  // with errno
  std::string text;         // empty: of another user, or nothing
  std::string from;         // the sender's address
};

// The next datagram, whose text counts where a process of this user has sent it.
Datagram receive(int fd, std::vector<char>& buffer) {
  sockaddr_un from{};
  iovec data{buffer.data(), buffer.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred))];
  msghdr message{};
  message.msg_name = &from;
  message.msg_namelen = sizeof from;
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t bytes = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  if (bytes < 0) return {.has_failed = true, .text = "", .from = ""};
  ucred sender{};
  sender.uid = static_cast<uid_t>(-1);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_CREDENTIALS) {
      std::memcpy(&sender, CMSG_DATA(header), sizeof sender);
    }
  }
  if (sender.uid != geteuid()) return {};
  Datagram found;
  found.text.assign(buffer.data(), static_cast<size_t>(bytes));
  if (message.msg_namelen > kNameOffset) {
    found.from.assign(from.sun_path + 1, message.msg_namelen - kNameOffset);
  }
  return found;
}

std::string name_of_socket(int fd) {
  sockaddr_un address{};
  socklen_t length = sizeof address;
  const int failed = getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  if (failed != 0 || length <= kNameOffset) return kNoAddress;
  return {address.sun_path + 1, length - kNameOffset};
}

void send_to(int fd, const std::string& name, const std::string& text) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (fd < 0 || name == kNoAddress || name.size() + 1 > sizeof address.sun_path) return;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  sendto(fd,
         text.data(),
         text.size(),
         MSG_DONTWAIT | MSG_NOSIGNAL,
         reinterpret_cast<sockaddr*>(&address),
         static_cast<socklen_t>(kNameOffset + name.size()));
}

std::string address_in(const std::string& words) { return words.substr(0, words.find(' ')); }
std::string number_in(const std::string& words) { return words.substr(words.find(' ') + 1); }

}  // namespace

class Invitations::Listener {
 public:
  explicit Listener(Invitations& owner)
      : owner_(owner), socket_(open_socket()), address_(kNoAddress) {
    if (socket_.get() < 0) return;
    address_ = name_of_socket(socket_.get());
    thread_ = start_thread([this] { run(); });
  }
  ~Listener() {
    if (!thread_.joinable()) return;
    stopping_ = true;
    send_to(socket_.get(), address_, "");
    thread_.join();
  }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int socket() const { return socket_.get(); }
  const std::string& address() const { return address_; }
  void close_after_fork() { socket_.reset(); }

 private:
  void run() {
    std::vector<char> buffer(kMostBytes);
    while (!stopping_) {
      const Datagram datagram = receive(socket_.get(), buffer);
      if (datagram.has_failed && errno != EINTR) return;
      if (datagram.text.empty()) continue;
      const std::string reply = owner_.answer(datagram.text);
      if (!reply.empty() && !datagram.from.empty()) send_to(socket_.get(), datagram.from, reply);
    }
  }

  Invitations& owner_;
  UniqueFd socket_;
  std::string address_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

Invitations& Invitations::instance() {
  static auto* const made = new Invitations;
  return *made;
}

void Invitations::after_fork() {
  // No lock: only the forking thread exists here, and another may have held it.
  Invitations& inherited = instance();
  if (inherited.listener_) inherited.listener_->close_after_fork();
}

std::string Invitations::open(Invited invited, Store& store) {
  const std::string number = random_id();
  std::lock_guard lock(mutex_);
  if (!listener_) listener_ = std::make_unique<Listener>(*this);
  open_[number] = {std::move(invited), &store};
  return listener_->address() + " " + number;
}

void Invitations::reopen(const std::string& words, Invited invited) {
  std::lock_guard lock(mutex_);
  open_[number_in(words)] = {std::move(invited), nullptr};
}

void Invitations::close(const std::string& words) {
  std::unique_ptr<Listener> ending;  // behind the lock, which its thread may be waiting for
  std::lock_guard lock(mutex_);
  open_.erase(number_in(words));
  if (open_.empty()) ending = std::move(listener_);
}

void Invitations::send(const std::string& to, const std::string& from) const {
  std::lock_guard lock(mutex_);
  if (listener_) {
    send_to(listener_->socket(), address_in(to), number_in(to) + " invite " + from);
  }
}

// "<number> invite <words>", or "<number> get|set <question> <key> <value>".
std::string Invitations::answer(const std::string& datagram) {
  std::istringstream in(datagram);
  std::string number, verb, first, second;
  in >> number >> verb >> first >> second;
  if (!in) return "";
  std::lock_guard lock(mutex_);
  const auto found = open_.find(number);
  if (found == open_.end()) return "";
  if (verb == "invite") {
    found->second.invited(first + " " + second);
    return "";
  }
  if (found->second.store == nullptr) return "";
  try {
    Store& store = *found->second.store;
    if (verb == "set") {
      // The value follows the key and a space.
      store.set(second, in.eof() ? "" : datagram.substr(static_cast<size_t>(in.tellg()) + 1));
      return first + " +";
    }
    const auto value = store.get(second, std::chrono::milliseconds(1));
    return first + (value ? " +" + *value : " -");
  } catch (const Error&) {
    return "";  // asked again, or given up, by who asked
  }
}

LentStore::~LentStore() {
  if (socket_ >= 0) ::close(socket_);
}

std::optional<std::string> LentStore::ask(const std::string& question,
                                          std::chrono::milliseconds timeout) {
  if (socket_ < 0) {
    socket_ = open_socket();
    secret_ = random_id();
  }
  std::vector<char> buffer(kMostBytes);
  const auto end = std::chrono::steady_clock::now() + timeout;
  do {
    // Nobody but who is asked can know it.
    const std::string mark = secret_ + std::to_string(++questions_) + " ";
    const size_t verb_end = question.find(' ') + 1;
    send_to(
        socket_,
        address_in(words_),
        number_in(words_) + " " + question.substr(0, verb_end) + mark + question.substr(verb_end));
    // The wait is no longer for anything else that comes.
    const auto until = std::chrono::steady_clock::now() + kAnswerTime;
    for (auto left = kAnswerTime; left.count() > 0;
         left = std::chrono::duration_cast<std::chrono::milliseconds>(
             until - std::chrono::steady_clock::now())) {
      pollfd entry{socket_, POLLIN, 0};
      if (poll(&entry, 1, static_cast<int>(left.count())) <= 0) break;
      const Datagram reply = receive(socket_, buffer);
      if (reply.text.starts_with(mark)) return reply.text.substr(mark.size());
    }
  } while (std::chrono::steady_clock::now() < end);
  return std::nullopt;
}

void LentStore::set(const std::string& key, const std::string& value) {
  if (!ask("set " + key + " " + value, kLenderTime)) own_.set(key, value);
}

std::optional<std::string> LentStore::get(const std::string& key,
                                          std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  for (auto pause = std::chrono::milliseconds(1);; pause = std::min(2 * pause, kAnswerTime / 10)) {
    const auto reply = ask("get " + key, std::chrono::milliseconds(0));
    if (!reply) return own_.get(key, timeout);
    if (reply->starts_with("+")) return reply->substr(1);
    if (std::chrono::steady_clock::now() >= end) return std::nullopt;
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace dpt
