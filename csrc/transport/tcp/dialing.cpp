#include "transport/tcp/dialing.hpp"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>

#include "base/env.hpp"
#include "base/log.hpp"

namespace dpt {
namespace {

using Clock = std::chrono::steady_clock;

// A caller that says nothing after it connected, or not enough, is dropped.
constexpr std::chrono::milliseconds kGreetingLimit{5000};
// A node that does not even answer is down, or a firewall swallows what is sent to it.
constexpr std::chrono::milliseconds kConnectLimit{10000};
// Unacknowledged for so long, a peer's node is taken for dead. Beats make sure that something is
// always under way, and the next one leaves within 0.5 s. The system counts from its first copy
// that got lost, 0.2 s later where it probed for a lost tail. Together this takes 2.8 s, of the 3 s
// promised.
constexpr unsigned kUserTimeoutMs = 2100;
// A socket with so much not yet sent has no room: more would only wait there while another socket
// could carry it.
constexpr int kNotSentBytes = 64 << 10;
constexpr int kBacklog = 4096;
// Callers under way at a time that have not said whom they call; more push out the oldest. As many
// are let in before all get their turn, lest a crowd at the door keeps the others waiting.
constexpr size_t kMostStrangers = 256;
// A rank that was pushed out before its first words had come calls again so soon.
constexpr std::chrono::milliseconds kCallAgain{10};

template <typename T>
void set_option(int fd, int level, int name, const T& value) {
  setsockopt(fd, level, name, &value, sizeof value);  // where there is none, all works without
}

UniqueFd make_socket(int family, const TcpSettings& settings) {
  UniqueFd fd(DPT_SYS_CHECK(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)));
  if (settings.socket_bytes != 0) {
    const int bytes = static_cast<int>(settings.socket_bytes);
    set_option(fd.get(), SOL_SOCKET, SO_SNDBUF, bytes);
    set_option(fd.get(), SOL_SOCKET, SO_RCVBUF, bytes);
  }
  const std::string& congestion = settings.congestion;
  if (!congestion.empty() &&
      setsockopt(fd.get(), IPPROTO_TCP, TCP_CONGESTION, congestion.data(), congestion.size()) !=
          0) {
    throw_system_error("DEEPYTORCH_TCP_CONGESTION=" + congestion);
  }
  return fd;
}

// Only the control socket gives a peer up that does not answer. To Linux a peer that is stopped,
// and so takes no data, is as silent as one that is gone. But the control socket's data always fits
// into the peer's buffer, so a stopped peer still acknowledges it.
void prepare(int fd, bool is_control) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  if (is_control) set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs);
  set_option(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kNotSentBytes);
}

// One connection on its way.
struct Dialog {
  UniqueFd fd;
  Handshake handshake;
  std::string with;  // for messages
  Clock::time_point until;
  bool connecting;
  Handshake::State state = Handshake::State::kWriting;
};

// A call that is to be made once more.
struct Redial {
  int rank;
  uint32_t socket;
  Clock::time_point at;
  Clock::time_point until;
};

class Dialer {
 public:
  Dialer(const Dialing& dialing, std::chrono::milliseconds limit)
      : dialing_(dialing), limit_(limit), until_(Clock::now() + limit) {
    for (const auto& [rank, endpoints] : dialing.peers) {
      missing_ += dialing.own.sockets;
      found_[rank].resize(dialing.own.sockets);
    }
  }

  std::map<int, std::vector<UniqueFd>> run() {
    for (const auto& [rank, endpoints] : dialing_.peers) {
      if (rank > static_cast<int>(dialing_.own.me)) continue;
      for (uint32_t socket = 0; socket < dialing_.own.sockets; ++socket) {
        call(rank, socket, Clock::now() + std::min(kConnectLimit, limit_));
      }
    }
    auto next_check = Clock::now() + kWaitSlice;
    while (missing_ > 0) {
      await();
      accept_some();
      for (auto dialog = dialogs_.begin(); dialog != dialogs_.end();) {
        dialog = goes_on(*dialog) ? std::next(dialog) : dialogs_.erase(dialog);
      }
      drop_oldest_strangers();
      call_again();
      if (Clock::now() >= next_check) {
        dialing_.check();
        next_check = Clock::now() + kWaitSlice;
      }
      if (missing_ > 0 && Clock::now() >= until_) throw_missing();
    }
    return std::move(found_);
  }

 private:
  void call(int rank, uint32_t socket, Clock::time_point until) {
    const auto& endpoints = dialing_.peers.at(rank);
    const Listener& own = dialing_.listeners[socket % dialing_.listeners.size()];
    const Endpoint& theirs = endpoints[socket % endpoints.size()];
    const std::string with = dialing_.names.at(rank) + " (" + theirs.address.describe() + " by " +
                             theirs.interface + ", from " + own.interface.name + ")";
    UniqueFd fd = make_socket(theirs.address.family(), dialing_.settings);
    if (own.address.family() == theirs.address.family()) {
      const SocketAddress source = SocketAddress::parse(own.interface.ip, 0);
      DPT_SYS_CHECK(bind(fd.get(), source.get(), source.length));
    }
    if (connect(fd.get(), theirs.address.get(), theirs.address.length) != 0 &&
        errno != EINPROGRESS) {
      throw_system_error("connecting to " + with);
    }
    dialogs_.push_back({std::move(fd),
                        Handshake::client(dialing_.own, static_cast<uint32_t>(rank), socket),
                        with,
                        until,
                        true});
  }

  void call_again() {
    std::vector<Redial> due;
    std::erase_if(redials_, [&](const Redial& each) {
      if (Clock::now() < each.at) return false;
      due.push_back(each);
      return true;
    });
    for (const Redial& each : due) call(each.rank, each.socket, each.until);
  }

  void await() {
    std::vector<pollfd> entries;
    for (const Listener& listener : dialing_.listeners) {
      entries.push_back({listener.fd.get(), POLLIN, 0});
    }
    for (const Dialog& dialog : dialogs_) {
      const bool writes = dialog.connecting || dialog.state == Handshake::State::kWriting;
      entries.push_back({dialog.fd.get(), static_cast<short>(writes ? POLLOUT : POLLIN), 0});
    }
    const auto limit = redials_.empty() ? kWaitSlice : kCallAgain;
    poll(entries.data(), entries.size(), static_cast<int>(limit.count()));
  }

  void accept_some() {
    for (const Listener& listener : dialing_.listeners) {
      for (size_t accepted = 0; accepted < kMostStrangers; ++accepted) {
        SocketAddress from;
        from.length = sizeof from.storage;
        UniqueFd fd(
            accept4(listener.fd.get(), from.get(), &from.length, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (fd.get() < 0) break;
        dialogs_.push_back({std::move(fd),
                            Handshake::server(dialing_.own),
                            from.describe() + " by " + listener.interface.name,
                            Clock::now() + kGreetingLimit,
                            false,
                            Handshake::State::kReading});
      }
    }
  }

  void drop_oldest_strangers() {
    const auto is_stranger = [](const Dialog& dialog) {
      return dialog.handshake.is_server() && !dialog.handshake.is_greeted();
    };
    auto left = std::count_if(dialogs_.begin(), dialogs_.end(), is_stranger);
    dialogs_.remove_if([&](const Dialog& dialog) {
      return left > static_cast<long>(kMostStrangers) && is_stranger(dialog) && left-- > 0;
    });
  }

  // False: the dialog is over, well or badly.
  bool goes_on(Dialog& dialog) {
    try {
      if (dialog.connecting) {
        pollfd entry{dialog.fd.get(), POLLOUT, 0};
        if (poll(&entry, 1, 0) == 0) return in_time(dialog);
        int error = 0;
        socklen_t length = sizeof error;
        getsockopt(dialog.fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
        if (error != 0) throw Error(DPT_ERR_SYSTEM, std::strerror(error));
        dialog.connecting = false;
      }
      dialog.state = dialog.handshake.advance(dialog.fd.get());
      if (dialog.state != Handshake::State::kDone) return in_time(dialog);
      keep(dialog);
    } catch (const Error& error) {
      // A failure is an error when this rank called the peer on the address it published; whoever
      // calls this rank may be anybody.
      if (!dialog.handshake.is_server()) {
        const auto now = Clock::now();
        if (!dialog.connecting && dialog.handshake.is_unanswered() && now < dialog.until) {
          redials_.push_back({static_cast<int>(dialog.handshake.peer()),
                              dialog.handshake.socket(),
                              now + kCallAgain,
                              dialog.until});
          return false;
        }
        throw Error(DPT_ERR_SYSTEM, dialog.with + " can't be reached: " + error.what());
      }
      log(LogLevel::kDebug, "turned away " + dialog.with + ": " + error.what());
    }
    return false;
  }

  static bool in_time(const Dialog& dialog) {
    if (Clock::now() < dialog.until) return true;
    throw Error(DPT_ERR_SYSTEM, dialog.connecting ? "no answer" : "it stopped in mid-greeting");
  }

  void keep(Dialog& dialog) {
    const auto peer = found_.find(static_cast<int>(dialog.handshake.peer()));
    if (peer == found_.end()) throw Error(DPT_ERR_SYSTEM, "a rank that has no business here");
    UniqueFd& place = peer->second[dialog.handshake.socket()];
    if (place.get() >= 0) throw Error(DPT_ERR_SYSTEM, "it has called before");
    prepare(dialog.fd.get(), dialog.handshake.socket() + 1 == dialing_.own.sockets);
    place = std::move(dialog.fd);
    --missing_;
  }

  [[noreturn]] void throw_missing() const {
    std::string names;
    for (const auto& [rank, sockets] : found_) {
      const bool all = std::all_of(
          sockets.begin(), sockets.end(), [](const UniqueFd& fd) { return fd.get() >= 0; });
      if (!all) names += (names.empty() ? "" : ", ") + dialing_.names.at(rank);
    }
    std::string own;
    for (const Listener& listener : dialing_.listeners) {
      own += (own.empty() ? "" : ", ") + listener.address.describe() + " by " +
             listener.interface.name;
    }
    throw Error(DPT_ERR_SYSTEM,
                names + " did not connect to " + own + " within " +
                    std::to_string(limit_.count() / 1000) +
                    " s. Does a firewall stand between, or is another interface meant? Name it "
                    "with the option ifname (DEEPYTORCH_IFNAME)");
  }

  const Dialing& dialing_;
  std::chrono::milliseconds limit_;
  Clock::time_point until_;
  std::list<Dialog> dialogs_;
  std::vector<Redial> redials_;
  std::map<int, std::vector<UniqueFd>> found_;
  size_t missing_ = 0;
};

}  // namespace

TcpSettings TcpSettings::from_env() {
  return {env().ifnames,
          env().num_sockets,
          env().socket_bytes,
          env().tcp_congestion,
          env().tcp_checksum};
}

Listener listen_on(const Interface& interface, const TcpSettings& settings) {
  Listener listener{{}, interface, SocketAddress::parse(interface.ip, 0)};
  listener.fd = make_socket(listener.address.family(), settings);
  const std::string where = interface.ip + " (" + interface.name + ")";
  if (bind(listener.fd.get(), listener.address.get(), listener.address.length) != 0) {
    throw_system_error("bind to " + where);
  }
  if (listen(listener.fd.get(), kBacklog) != 0) throw_system_error("listen on " + where);
  DPT_SYS_CHECK(getsockname(listener.fd.get(), listener.address.get(), &listener.address.length));
  return listener;
}

std::map<int, std::vector<UniqueFd>> dial(const Dialing& dialing, std::chrono::milliseconds limit) {
  return Dialer(dialing, limit).run();
}

}  // namespace dpt
