#include "comm/invitations.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <sstream>
#include <thread>

#include "bootstrap/exchange.hpp"

namespace dpt {
namespace {

// Of a process that can't listen. Nobody can invite it: its peers' messages wait for its own first
// operation.
const std::string kNoAddress = "-";

constexpr socklen_t kNameOffset = offsetof(sockaddr_un, sun_path) + 1;

}  // namespace

Invitations& Invitations::instance() {
  // Never destroyed: its thread runs until the process ends.
  static auto* const made = new Invitations;
  return *made;
}

Invitations::Invitations() : address_(kNoAddress) {
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t length = sizeof address;
  // Bound to no name at all: the kernel picks a free abstract one, gone with its descriptor.
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      length <= kNameOffset) {
    ::close(fd);
    return;
  }
  socket_ = fd;
  address_.assign(address.sun_path + 1, length - kNameOffset);
  // Signals belong to the application's threads: Python runs its handlers in the main one.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([this] { run(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  static int inherited = fd;
  pthread_atfork(nullptr, nullptr, [] { ::close(inherited); });
}

std::string Invitations::open(std::function<void()> invited) {
  const std::string number = random_id();
  std::lock_guard lock(mutex_);
  open_[number] = std::move(invited);
  return address_ + " " + number;
}

void Invitations::close(const std::string& words) {
  const std::string number = words.substr(words.find(' ') + 1);
  std::lock_guard lock(mutex_);
  open_.erase(number);
}

void Invitations::send(const std::string& words) const {
  std::istringstream in(words);
  std::string name, number;
  in >> name >> number;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (!in || name == kNoAddress || name.size() + 1 > sizeof address.sun_path) return;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  sendto(socket_,
         number.data(),
         number.size(),
         MSG_DONTWAIT | MSG_NOSIGNAL,
         reinterpret_cast<sockaddr*>(&address),
         static_cast<socklen_t>(kNameOffset + name.size()));
}

void Invitations::run() {
  char number[64];
  for (;;) {
    const ssize_t bytes = recv(socket_, number, sizeof number, 0);
    if (bytes < 0 && errno != EINTR) return;
    if (bytes <= 0) continue;
    std::lock_guard lock(mutex_);
    const auto found = open_.find(std::string(number, static_cast<size_t>(bytes)));
    if (found != open_.end()) found->second();
  }
}

}  // namespace dpt
