#include "transport/tcp/connection.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

namespace dpt {
namespace {

// Farewell and the ends of the data sockets travel apart, so an end alone proves nothing at once.
constexpr std::chrono::milliseconds kFarewellGrace{1500};
// Stripes that the reactor reads from a socket before the next one's turn.
constexpr int kReadsInARow = 4;

bool is_lost_connection(int error) {
  return error == ECONNRESET || error == EPIPE || error == ECONNABORTED;
}

}  // namespace

Connection::Connection(Peer peer, Host host)
    : peer_name_(std::move(peer.name)),
      checksum_(peer.checksum),
      host_(std::move(host)),
      control_(std::move(peer.control)),
      heard_at_(std::chrono::steady_clock::now()),
      ticked_at_(heard_at_),
      ticked_before_(heard_at_) {
  sockets_.resize(peer.data.size());
  for (size_t i = 0; i < sockets_.size(); ++i) {
    sockets_[i].fd = std::move(peer.data[i]);
    sockets_[i].id = host_.reactor.add(
        sockets_[i].fd.get(), [this, i](uint32_t events) { on_data(i, events); }, nullptr);
  }
  control_id_ = host_.reactor.add(
      control_.get(), [this](uint32_t events) { on_control(events); }, [this] { on_tick(); });
  // From here on the reactor calls.
  Lock lock(mutex_);
  for (const Socket& socket : sockets_) host_.reactor.watch(socket.id, socket.fd.get(), 0);
  host_.reactor.watch(control_id_, control_.get(), EPOLLIN);
}

Connection::~Connection() {
  for (Socket& socket : sockets_) host_.reactor.remove(socket.id, socket.fd.get());
  host_.reactor.remove(control_id_, control_.get());
  std::vector<UniqueFd> ended;
  {
    Lock lock(mutex_);
    queue_control(ControlHeader::kBye, DPT_OK, "");
    flush_control();
    shutdown(control_.get(), SHUT_WR);
    ended.push_back(std::move(control_));
    for (Socket& socket : sockets_) {
      shutdown(socket.fd.get(), SHUT_WR);
      ended.push_back(std::move(socket.fd));
    }
  }
  host_.reactor.linger(std::move(ended));
}

uint64_t Connection::send(const void* data, size_t bytes, Mover mover) {
  Lock lock(mutex_);
  outgoing_.push_back(
      {static_cast<const char*>(data), bytes, stripe_bytes_of(bytes, sockets_.size()), 0, bytes});
  const uint64_t number = first_outgoing_ + outgoing_.size() - 1;
  if (mover == Mover::kCaller) write_all();
  update_interest();
  report(lock);
  return number;
}

uint64_t Connection::receive(void* data, size_t capacity, Mover mover) {
  Lock lock(mutex_);
  incoming_.push_back({static_cast<char*>(data), capacity, mover});
  const uint64_t number = first_incoming_ + incoming_.size() - 1;
  unpark();
  update_interest();
  report(lock);
  return number;
}

void Connection::wait_sent(uint64_t message, const WaitContext& wait) {
  Lock lock(mutex_);
  while (first_outgoing_ <= message) {
    check_usable(wait);
    changed_.wait_for(lock, wait.deadline.next_slice());
    if (first_outgoing_ > message) return;
    lock.unlock();
    host_.check();
    wait.check();
    lock.lock();
    if (wait.deadline.expired()) time_out(lock, wait);
  }
}

size_t Connection::wait_received(uint64_t message, const WaitContext& wait) {
  Lock lock(mutex_);
  while (first_incoming_ <= message) {
    check_usable(wait);
    if (reactor_receives()) {
      changed_.wait_for(lock, wait.deadline.next_slice());
    } else {
      read_all();
      if (first_incoming_ > message) break;
      check_usable(wait);
      poll_sockets(lock, wait.deadline.next_slice());
    }
    if (first_incoming_ > message) break;
    lock.unlock();
    host_.check();
    wait.check();
    lock.lock();
    if (wait.deadline.expired()) {
      read_all();
      if (first_incoming_ > message) break;
      time_out(lock, wait);
    }
  }
  DPT_CHECK(message >= first_received_);
  const size_t bytes = received_bytes_[message - first_received_];
  forget_received(message);
  return bytes;
}

bool Connection::is_sent(uint64_t message, const WaitContext& wait) {
  const Lock lock(mutex_);
  if (first_outgoing_ <= message) check_usable(wait);
  return first_outgoing_ > message;
}

bool Connection::is_received(uint64_t message, const WaitContext& wait) {
  const Lock lock(mutex_);
  if (first_incoming_ <= message) {
    check_usable(wait);
    return false;
  }
  forget_received(message);
  return true;
}

// And what came before it.
void Connection::forget_received(uint64_t message) {
  while (first_received_ <= message) {
    received_bytes_.pop_front();
    ++first_received_;
  }
  update_interest();
}

void Connection::cancel() {
  Lock lock(mutex_);
  if (outgoing_.empty() && incoming_.empty()) return;
  outgoing_.clear();
  incoming_.clear();
  for (Socket& socket : sockets_) {
    socket.ended = true;
    host_.reactor.silence(socket.fd.get());
  }
  if (!failure_) failure_.emplace(DPT_ERR_ABORTED, "an operation was given up half-way");
}

// For who waits: the caller is the only reader now.
void Connection::poll_sockets(Lock& lock, std::chrono::milliseconds slice) {
  std::vector<pollfd> entries;
  for (const Socket& socket : sockets_) {
    if (!socket.ended && !socket.parked) entries.push_back({socket.fd.get(), POLLIN, 0});
  }
  lock.unlock();
  poll(entries.data(), entries.size(), static_cast<int>(slice.count()));
  lock.lock();
  read_all();
}

void Connection::check_usable(const WaitContext& wait) {
  if (failure_) throw Error(failure_->status(), wait.describe() + ": " + failure_->what());
  if (!any_ended_) return;
  // Data that a peer sent before it left may still be on its way on the other sockets.
  const bool open = std::any_of(sockets_.begin(), sockets_.end(), [](const Socket& socket) {
    return !socket.ended && !socket.parked;
  });
  if (left_ && open) return;
  if (left_) {
    throw Error(DPT_ERR_PEER_LOST,
                wait.describe() + ": " + peer_name_ + kHasLeft + " and will not come");
  }
  if (std::chrono::steady_clock::now() - ended_at_ > kFarewellGrace) {
    throw Error(DPT_ERR_PEER_LOST, wait.describe() + ": " + peer_name_ + " closed its connection");
  }
}

void Connection::time_out(Lock& lock, const WaitContext& wait) {
  // Not until now: where this machine stood still, the peer may have, too, and nothing was heard.
  const auto silent =
      std::chrono::duration_cast<std::chrono::milliseconds>(ticked_before_ - heard_at_);
  lock.unlock();
  const bool alive = silent < 4 * Reactor::kTick;
  throw Error(DPT_ERR_TIMEOUT,
              wait.describe() + " timed out after " +
                  std::to_string(wait.deadline.timeout().count()) + " ms: " + peer_name_ +
                  (alive ? " sent nothing, though alive: was this call skipped there, or is the "
                           "rank busy?"
                         : " has been silent for " + std::to_string(silent.count()) +
                               " ms: stopped or frozen?"));
}

// ---- data ----

bool Connection::next_stripe(Socket& socket) {
  // Sockets take stripes in the order of messages, so those with some left are at the end.
  for (size_t i = 0; i < outgoing_.size(); ++i) {
    Outgoing& message = outgoing_[i];
    if (message.started && message.assigned == message.bytes) continue;
    const size_t bytes = std::min(message.stripe_bytes, message.bytes - message.assigned);
    socket.out = {StripeHeader::kMagic,
                  static_cast<uint32_t>(bytes),
                  first_outgoing_ + i,
                  message.assigned,
                  message.bytes,
                  checksum_ ? 1U : 0U,
                  0};
    socket.out_data = message.data + message.assigned;
    if (checksum_) socket.out.checksum = checksum_of(socket.out, socket.out_data);
    socket.out_done = 0;
    socket.sending = true;
    message.assigned += bytes;
    message.started = true;
    return true;
  }
  return false;
}

bool Connection::write_stripe(Socket& socket) {
  socket.blocked = false;
  if (failure_ || (!socket.sending && !next_stripe(socket))) return false;
  const size_t all = sizeof(StripeHeader) + socket.out.bytes;
  while (socket.out_done < all) {
    iovec parts[2];
    int count = 0;
    if (socket.out_done < sizeof(StripeHeader)) {
      parts[count++] = {reinterpret_cast<char*>(&socket.out) + socket.out_done,
                        sizeof(StripeHeader) - socket.out_done};
    }
    const size_t done = std::max(socket.out_done, sizeof(StripeHeader)) - sizeof(StripeHeader);
    if (socket.out.bytes > done) {
      parts[count++] = {const_cast<char*>(socket.out_data) + done, socket.out.bytes - done};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<size_t>(count);
    const ssize_t sent = sendmsg(socket.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) {
      socket.blocked = true;
      return false;
    }
    if (sent < 0) {
      socket_failed(socket, errno);
      return false;
    }
    socket.out_done += static_cast<size_t>(sent);
  }
  socket.sending = false;
  outgoing_[socket.out.message - first_outgoing_].unwritten -= socket.out.bytes;
  finish_outgoing();
  return true;
}

void Connection::finish_outgoing() {
  bool any = false;
  while (!outgoing_.empty() && outgoing_.front().started && outgoing_.front().unwritten == 0) {
    // A message of no bytes is through only when its header is.
    bool on_its_way = false;
    for (const Socket& socket : sockets_) {
      on_its_way |= socket.sending && socket.out.message == first_outgoing_;
    }
    if (on_its_way) break;
    outgoing_.pop_front();
    ++first_outgoing_;
    any = true;
  }
  if (any) changed_.notify_all();
}

void Connection::write_all() {
  bool moved = true;
  while (moved) {
    moved = false;
    for (size_t i = 0; i < sockets_.size(); ++i) {
      Socket& socket = sockets_[(next_socket_ + i) % sockets_.size()];
      if (socket.blocked || !write_stripe(socket)) continue;
      moved = true;
      next_socket_ = (next_socket_ + i + 1) % sockets_.size();
      break;
    }
  }
}

bool Connection::read_header(Socket& socket) {
  while (socket.in_done < sizeof(StripeHeader)) {
    const ssize_t got = recv(socket.fd.get(),
                             reinterpret_cast<char*>(&socket.in) + socket.in_done,
                             sizeof(StripeHeader) - socket.in_done,
                             MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return false;
    if (got <= 0) {
      socket_failed(socket, got == 0 ? 0 : errno);
      return false;
    }
    socket.in_done += static_cast<size_t>(got);
    if (socket.in_done < sizeof(StripeHeader)) continue;
    std::string fault = fault_of(socket.in);
    if (fault.empty() && socket.in.message < first_incoming_) fault = "a stripe of the past";
    if (!fault.empty()) {
      broken("sent " + fault, DPT_ERR_SYSTEM);
      return false;
    }
  }
  return true;
}

bool Connection::is_intact(const Socket& socket, const char* data) {
  const StripeHeader& header = socket.in;
  if (header.checked == 0 || checksum_of(header, data) == header.checksum) return true;
  broken("sent message #" + std::to_string(header.message) + " of " + std::to_string(header.total) +
             " bytes, of which bytes " + std::to_string(header.offset) + " to " +
             std::to_string(header.offset + header.bytes) +
             " do not match their checksum: something on the way, or the memory of one of the "
             "two machines, changes data",
         DPT_ERR_SYSTEM);
  return false;
}

bool Connection::read_stripe(Socket& socket) {
  if (failure_ || socket.ended || socket.parked || !read_header(socket)) return false;
  const size_t index = socket.in.message - first_incoming_;
  if (index >= incoming_.size()) {
    socket.parked = true;
    return false;
  }
  Incoming& message = incoming_[index];
  const bool fits =
      message.seen ? socket.in.total == message.total : socket.in.total <= message.capacity;
  if (!fits) {
    broken("sent a message of " + std::to_string(socket.in.total) + " bytes where " +
               std::to_string(message.seen ? message.total : message.capacity) + " were expected",
           DPT_ERR_SYSTEM);
    return false;
  }
  message.total = socket.in.total;
  message.seen = true;
  const size_t all = sizeof(StripeHeader) + socket.in.bytes;
  while (socket.in_done < all) {
    const size_t done = socket.in_done - sizeof(StripeHeader);
    const ssize_t got = recv(socket.fd.get(),
                             message.data + socket.in.offset + done,
                             socket.in.bytes - done,
                             MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return false;
    if (got <= 0) {
      socket_failed(socket, got == 0 ? 0 : errno);
      return false;
    }
    socket.in_done += static_cast<size_t>(got);
    heard_at_ = std::chrono::steady_clock::now();
  }
  socket.in_done = 0;
  if (!is_intact(socket, message.data + socket.in.offset)) return false;
  message.got += socket.in.bytes;
  if (message.got > message.total) {
    broken("sent a part of a message twice", DPT_ERR_SYSTEM);
    return false;
  }
  finish_incoming();
  return true;
}

void Connection::finish_incoming() {
  bool any = false;
  while (!incoming_.empty() && incoming_.front().complete()) {
    received_bytes_.push_back(incoming_.front().total);
    incoming_.pop_front();
    ++first_incoming_;
    any = true;
  }
  if (any) changed_.notify_all();
}

void Connection::read_all() {
  bool moved = true;
  while (moved && !incoming_.empty()) {
    moved = false;
    for (Socket& socket : sockets_) moved |= read_stripe(socket);
  }
}

void Connection::unpark() {
  for (Socket& socket : sockets_) {
    if (!socket.parked || socket.in.message - first_incoming_ >= incoming_.size()) continue;
    socket.parked = false;
    // A message of no bytes is here already: nothing more comes that would wake the reactor.
    if (socket.in.bytes == 0) read_stripe(socket);
  }
}

// Once the reactor has one to receive it receives all, so that only one thread waits for each.
bool Connection::reactor_receives() const {
  for (const Incoming& message : incoming_) {
    if (message.mover == Mover::kReactor) return true;
  }
  return false;
}

void Connection::set_interest(Socket& socket, uint32_t events) {
  if (socket.watched == events || socket.ended) return;
  socket.watched = events;
  host_.reactor.watch(socket.id, socket.fd.get(), events);
}

void Connection::update_interest() {
  const bool reads = reactor_receives();
  bool unassigned = false;
  for (const Outgoing& message : outgoing_) {
    unassigned |= !message.started || message.assigned < message.bytes;
  }
  for (Socket& socket : sockets_) {
    const bool in = reads && !socket.parked;
    const bool out = !failure_ && (socket.sending || unassigned);
    set_interest(socket, (in ? uint32_t{EPOLLIN} : 0) | (out ? uint32_t{EPOLLOUT} : 0));
  }
}

void Connection::on_data(size_t index, uint32_t events) {
  Lock lock(mutex_);
  Socket& socket = sockets_[index];
  if (socket.ended) return;
  if ((events & EPOLLOUT) != 0) {
    write_stripe(socket);  // one, so that all sockets that have room get their share
  }
  if (reactor_receives()) {
    for (int i = 0; i < kReadsInARow && read_stripe(socket); ++i) {
    }
  }
  // Reported whether asked for or not, and again and again: the caller's wait finds it too.
  if ((events & (EPOLLERR | EPOLLHUP)) != 0 && !socket.ended) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(socket.fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    char byte = 0;
    const bool more = recv(socket.fd.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) > 0;
    if (!more || error != 0) {
      socket_failed(socket, error);
    } else if (!reactor_receives()) {
      host_.reactor.silence(socket.fd.get());  // it ends when it has been read to its end
      socket.watched = 0;
    }
  }
  update_interest();
  report(lock);
}

void Connection::socket_failed(Socket& socket, int error) {
  socket.ended = true;
  host_.reactor.silence(socket.fd.get());
  if (!any_ended_) ended_at_ = std::chrono::steady_clock::now();
  any_ended_ = true;
  if (error != 0 && !is_lost_connection(error)) {
    broken(std::string("can't be reached: ") + std::strerror(error));
  }
  changed_.notify_all();
}

// ---- control ----

void Connection::broken(const std::string& how, dpt_status status) {
  if (failure_) return;
  failure_.emplace(status, peer_name_ + " " + how);
  reported_ = false;
  changed_.notify_all();
}

void Connection::report(Lock& lock) {
  if (reported_) return;
  reported_ = true;
  const Error failure = *failure_;
  lock.unlock();
  host_.on_trouble(failure.status(), failure.what());
  lock.lock();
}

void Connection::queue_control(ControlHeader::Kind kind,
                               dpt_status status,
                               const std::string& text) {
  const std::string cut = text.substr(0, ControlHeader::kMostText);
  const ControlHeader header{ControlHeader::kMagic,
                             kind,
                             static_cast<uint16_t>(status),
                             static_cast<uint32_t>(cut.size())};
  control_out_.append(reinterpret_cast<const char*>(&header), sizeof header);
  control_out_ += cut;
}

void Connection::flush_control() {
  while (!control_out_.empty()) {
    const ssize_t sent = ::send(
        control_.get(), control_out_.data(), control_out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return;  // full, or broken, of which the reactor tells
    control_out_.erase(0, static_cast<size_t>(sent));
  }
}

void Connection::abort(dpt_status status, const std::string& reason) {
  Lock lock(mutex_);
  if (said_abort_) return;
  said_abort_ = true;
  queue_control(ControlHeader::kAbort, status, reason);
  flush_control();
  changed_.notify_all();
}

void Connection::on_tick() {
  Lock lock(mutex_);
  ticked_before_ = ticked_at_;
  ticked_at_ = std::chrono::steady_clock::now();
  // A peer that reads nothing for long (it is stopped) is not sent ever more.
  if (control_out_.empty()) queue_control(ControlHeader::kBeat, DPT_OK, "");
  flush_control();
}

void Connection::read_control() {
  while (control_in_.size() >= sizeof(ControlHeader)) {
    ControlHeader header;
    std::memcpy(&header, control_in_.data(), sizeof header);
    if (const std::string fault = fault_of(header); !fault.empty()) {
      return broken("sent " + fault, DPT_ERR_SYSTEM);
    }
    if (control_in_.size() < sizeof header + header.bytes) return;
    const std::string text = control_in_.substr(sizeof header, header.bytes);
    control_in_.erase(0, sizeof header + header.bytes);
    if (header.kind == ControlHeader::kBye) {
      left_ = true;
      changed_.notify_all();
    } else if (header.kind == ControlHeader::kAbort && !failure_) {
      // A timeout or an interrupt belongs to the rank it happened on; here it is an abort. Of a
      // process on its node the peer knows no address, so its own says where that was.
      failure_.emplace(header.status == DPT_ERR_PEER_LOST ? DPT_ERR_PEER_LOST : DPT_ERR_ABORTED,
                       text + ", told by " + peer_name_);
      reported_ = false;
      changed_.notify_all();
    }
  }
}

void Connection::on_control(uint32_t events) {
  Lock lock(mutex_);
  char buffer[4096];
  for (;;) {
    const ssize_t got = recv(control_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN && (events & EPOLLERR) == 0) break;
    if (got > 0) {
      heard_at_ = std::chrono::steady_clock::now();
      control_in_.append(buffer, static_cast<size_t>(got));
      read_control();
      continue;
    }
    const int error = got < 0 ? errno : 0;
    host_.reactor.silence(control_.get());
    if (left_) break;
    if (error == 0 || is_lost_connection(error)) {
      broken("died or was cut off: its end of the connection was closed");
    } else {
      broken(std::string("can't be reached: ") + std::strerror(error));
    }
    break;
  }
  report(lock);
}

}  // namespace dpt
