#include "comm/invitations.hpp"

#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <sstream>
#include <thread>

#include "base/error.hpp"
#include "base/thread.hpp"
#include "base/wait.hpp"
#include "bootstrap/exchange.hpp"

namespace dpt {
namespace {

// The address of a process that can't listen. Nobody can invite it: its peers' messages wait for
// its own first operation.
const std::string kNoAddress = "-";

// How long a question waits for its answer before it is asked again.
constexpr std::chrono::milliseconds kAnswerTime{100};
// The lender answers at once, or has left.
constexpr std::chrono::milliseconds kLenderTime{1000};
// So many peers ask the lender at a time that there was no room for one more.
constexpr std::chrono::milliseconds kPause{1};

// Without waiting; false with errno, EAGAIN where the addressee has no room.
bool send_to(const KeyedSocket& from, const std::string& name, const std::string& text) {
  if (name != kNoAddress) return send_local(from.fd(), text, {}, MSG_DONTWAIT, name);
  errno = ECONNREFUSED;
  return false;
}

std::string address_in(const std::string& words) { return words.substr(0, words.find(' ')); }
std::string number_in(const std::string& words) { return words.substr(words.find(' ') + 1); }

}  // namespace

class Invitations::Listener {
 public:
  explicit Listener(Invitations& owner) : owner_(owner) {
    try {
      socket_ = KeyedSocket::make();
    } catch (const Error&) {
      return;
    }
    thread_ = start_thread([this] { run(); });
  }
  ~Listener() {
    if (!thread_.joinable()) return;
    stopping_ = true;
    send(socket_.address().name, socket_.address().key);
    thread_.join();
  }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // The two words that make a peer's datagram come to the group with a fresh number.
  std::string words() const {
    const KeyedAddress& own = socket_.address();
    return (own.name.empty() ? kNoAddress : own.name) + " " + own.key + random_id();
  }
  void send(const std::string& name, const std::string& text) const {
    send_to(socket_, name, text);
  }
  void close_after_fork() { socket_.reset(); }

 private:
  void run() {
    while (!stopping_) {
      const std::optional<LocalMessage> datagram = socket_.receive();
      if (!datagram && errno != EINTR && errno != EAGAIN) return;
      if (!datagram) continue;
      const std::string reply = owner_.answer(datagram->text);
      if (!reply.empty() && !datagram->from.empty()) send(datagram->from, reply);
    }
  }

  Invitations& owner_;
  KeyedSocket socket_;
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
  std::lock_guard lock(mutex_);
  if (!listener_) listener_ = std::make_unique<Listener>(*this);
  const std::string words = listener_->words();
  open_[number_in(words)] = {std::move(invited), &store};
  return words;
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
  if (listener_) listener_->send(address_in(to), number_in(to) + " invite " + from);
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

std::optional<std::string> LentStore::ask(const std::string& question,
                                          std::chrono::milliseconds timeout) {
  try {
    if (socket_.fd() < 0) socket_ = KeyedSocket::make();
  } catch (const Error&) {
    return std::nullopt;
  }
  const size_t verb_end = question.find(' ') + 1;
  const auto end = std::chrono::steady_clock::now() + timeout;
  do {
    const std::string mark = socket_.address().key + std::to_string(++questions_) + " ";
    const std::string text =
        number_in(words_) + " " + question.substr(0, verb_end) + mark + question.substr(verb_end);
    const Deadline answered(kAnswerTime);
    while (!send_to(socket_, address_in(words_), text)) {
      if (errno != EAGAIN) return std::nullopt;  // it has left
      if (answered.expired()) break;
      std::this_thread::sleep_for(kPause);
    }
    // The wait is no longer for anything else that comes.
    while (!answered.expired()) {
      if (!readable_within(socket_.fd(), answered.next_slice())) continue;
      const std::optional<LocalMessage> reply = socket_.receive();
      if (reply && reply->text.starts_with(mark)) return reply->text.substr(mark.size());
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
