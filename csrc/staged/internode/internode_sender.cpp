#include "staged/internode/internode_sender.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "host/reduce_for_device.hpp"

namespace dpt::staged {
namespace {

// Chunks that collect, or have collected and are not yet spread; also most that only collect.
constexpr uint64_t kCollecting = 2;

}  // namespace

// Sums stay in range between nodes as within one: 16-bit floats are averaged on each, of which all
// have as many ranks, then among them.
void plan_travel(Job* job, Collective collective, const Membership& ranks) {
  job->collects = collective != DPT_ALL_GATHER;
  job->spreads = collective != DPT_REDUCE_SCATTER;
  job->nodes_op = job->op == DPT_PREMUL_SUM ? DPT_SUM : job->op;
  if (job->op != DPT_AVG) return;
  const bool twice = size_of(job->dtype) == 2;
  job->nodes_divisor = twice ? ranks.layout.num_nodes() : ranks.layout.size();
  if (!twice) job->op = DPT_SUM;
}

InternodeSender::InternodeSender(std::shared_ptr<Between> between,
                                 const Membership& ranks,
                                 const Board& board)
    : between_(std::move(between)),
      ranks_(ranks),
      board_(board),
      others_(ranks.layout.others(ranks.node())),
      context_{Deadline(std::chrono::hours(24)),
               [] { return std::string("CPU-Reduce between nodes"); },
               nullptr},
      greetings_(ranks.layout.num_nodes()) {
  const size_t share = round_up(board.shape().slot_bytes / board.shape().nodes, kCacheLine);
  scratch_.resize(kCollecting * board.shape().nodes * (share + kCacheLine));
}

InternodeSender::~InternodeSender() { cancel(); }

void InternodeSender::cancel() {
  between_->links.cancel();
  trips_.clear();
}

void InternodeSender::tell_trouble(const Error& error) const {
  between_->on_trouble(error.status(), error.what());
}

Connection& InternodeSender::to(int node) const {
  return between_->links.to(ranks_.layout.ranks[node][ranks_.local()]);
}
InternodeSender::Ticket InternodeSender::send(int node, const void* data, size_t bytes) {
  return {node, to(node).send(data, bytes, Links::Mover::kReactor)};
}
InternodeSender::Ticket InternodeSender::receive(int node, void* data, size_t capacity) {
  return {node, to(node).receive(data, capacity, Links::Mover::kReactor)};
}

bool InternodeSender::have_gone(std::vector<Ticket>* tickets) {
  std::erase_if(*tickets, [&](const Ticket& ticket) {
    return to(ticket.node).is_sent(ticket.number, context_);
  });
  return tickets->empty();
}
bool InternodeSender::have_come(std::vector<Ticket>* tickets) {
  std::erase_if(*tickets, [&](const Ticket& ticket) {
    return to(ticket.node).is_received(ticket.number, context_);
  });
  return tickets->empty();
}

int InternodeSender::awaited() const {
  const auto partner = [&](int node) { return ranks_.layout.ranks[node][ranks_.local()]; };
  if (!greetings_to_come_.empty()) return partner(greetings_to_come_.front().node);
  for (const Trip& trip : trips_) {
    if (!trip.received.empty()) return partner(trip.received.front().node);
  }
  return -1;
}

bool InternodeSender::is_done(const Trip& trip) const {
  return trip.arrived && trip.sent.empty() && trip.spreading == job_.spreads;
}

bool InternodeSender::is_through(uint64_t first) const {
  return first == first_ && greetings_to_come_.empty() && greetings_sent_.empty() &&
         trips_.empty() && num_collected_ == (job_.collects ? carried_ : 0) &&
         num_spread_ == (job_.spreads ? carried_ : 0);
}

bool InternodeSender::advance(const Job& job, uint64_t first) {
  if (first != first_) {
    job_ = job;
    first_ = first;
    greet();
    return true;
  }
  have_gone(&greetings_sent_);
  if (!greetings_to_come_.empty()) return hear();
  bool moved = false;
  for (Trip& trip : trips_) moved |= settle(trip);
  while (!trips_.empty() && is_done(trips_.front())) {
    tell(trips_.front());
    trips_.pop_front();
  }
  return post() || moved;
}

// ---- What operation it is ----

void InternodeSender::greet() {
  const auto ranks = static_cast<uint64_t>(board_.shape().ranks);
  const auto local = static_cast<uint64_t>(ranks_.local());
  num_collected_ = num_spread_ = 0;
  carried_ = job_.chunks;
  if (job_.collects) carried_ = (first_ + job_.chunks + ranks - 1 - local) / ranks;
  if (job_.collects) carried_ -= (first_ + ranks - 1 - local) / ranks;
  own_ = {job_.description, low(first_)};
  for (const int node : others_) {
    greetings_sent_.push_back(send(node, &own_, sizeof own_));
    greetings_to_come_.push_back(receive(node, &greetings_[node], sizeof own_));
  }
}

bool InternodeSender::hear() {
  if (!have_come(&greetings_to_come_)) return false;
  for (const int node : others_) {
    const Greeting& theirs = greetings_[node];
    if (theirs.description == own_.description && theirs.first == own_.first) continue;
    other_ = ranks_.layout.ranks[node][ranks_.local()];
    return true;
  }
  return true;
}

// ---- Its chunks ----

uint64_t InternodeSender::chunk(uint64_t n) const {
  if (!job_.collects) return n;
  const auto ranks = static_cast<uint64_t>(board_.shape().ranks);
  const auto local = static_cast<uint64_t>(ranks_.local());
  return (first_ + ranks - 1 - local) / ranks * ranks + local - first_ + n * ranks;
}

// This rank's load is in its slot.
bool InternodeSender::is_there(uint64_t chunk) const {
  const uint64_t number = number_of(chunk);
  const size_t place = number % board_.shape().depth;
  const Word& word = job_.collects ? board_.reduced(place) : board_.arrived(ranks_.local(), place);
  return has_come_to(word.load(std::memory_order_acquire), low(number));
}

char* InternodeSender::slot(uint64_t chunk) const {
  const size_t place = number_of(chunk) % board_.shape().depth;
  return job_.collects ? board_.result(place) : board_.input(ranks_.local(), place);
}

Share InternodeSender::block(int node, uint64_t chunk) const {
  const int nodes = board_.shape().nodes;
  if (job_.num_pieces == 1) return share_of(job_.bytes(chunk), node, nodes);
  const size_t bytes = job_.num_pieces / nodes * job_.pitch(chunk);
  return {node * bytes, (node + 1) * bytes};
}

char* InternodeSender::collected(int node, uint64_t n) {
  const size_t part = scratch_.size() / (kCollecting * board_.shape().nodes);
  return scratch_.data() + (n % kCollecting * board_.shape().nodes + node) * part;
}

bool InternodeSender::post() {
  const bool both = job_.collects && job_.spreads;
  // A chunk so far on that it needs this one's slots waits for it to be spread.
  const auto ranks = static_cast<uint64_t>(board_.shape().ranks);
  const uint64_t ahead = ranks < static_cast<uint64_t>(board_.shape().depth) ? kCollecting : 1;
  const bool collects =
      job_.collects && num_collected_ < carried_ && (!both || num_collected_ < num_spread_ + ahead);
  if (collects) {
    const uint64_t next = chunk(num_collected_);
    if (!both && trips_.size() == kCollecting) return false;
    if (!is_there(next)) return false;
    collect(trips_.emplace_back(Trip{next}));
    return true;
  }
  if (!job_.spreads || num_spread_ == carried_) return false;
  if (!job_.collects) {
    const uint64_t next = chunk(num_spread_);
    if (!is_there(next)) return false;
    spread(trips_.emplace_back(Trip{next}));
    return true;
  }
  const auto trip =
      std::find_if(trips_.begin(), trips_.end(), [](const Trip& each) { return !each.spreading; });
  if (trip == trips_.end() || !trip->arrived || !trip->sent.empty()) return false;
  spread(*trip);
  return true;
}

void InternodeSender::collect(Trip& trip) {
  const Share own = block(ranks_.node(), trip.chunk);
  char* const from = slot(trip.chunk);
  for (const int node : others_) {
    const Share theirs = block(node, trip.chunk);
    trip.received.push_back(receive(node, collected(node, num_collected_), own.end - own.begin));
    trip.sent.push_back(send(node, from + theirs.begin, theirs.end - theirs.begin));
  }
  trip.first_place = num_collected_++;
}

void InternodeSender::spread(Trip& trip) {
  const Share own = block(ranks_.node(), trip.chunk);
  char* const at = slot(trip.chunk);
  trip.spreading = true;
  trip.arrived = false;
  for (const int node : others_) {
    const Share theirs = block(node, trip.chunk);
    trip.received.push_back(receive(node, at + theirs.begin, theirs.end - theirs.begin));
    trip.sent.push_back(send(node, at + own.begin, own.end - own.begin));
  }
  ++num_spread_;
}

// Looks what of it has come and gone; true: a stage came to its end.
bool InternodeSender::settle(Trip& trip) {
  const bool had_gone = trip.sent.empty();
  const bool gone = have_gone(&trip.sent);
  bool moved = gone && !had_gone;
  if (!trip.arrived && have_come(&trip.received)) {
    if (!trip.spreading) add_up(trip);
    trip.arrived = true;
    moved = true;
  }
  return moved;
}

void InternodeSender::add_up(const Trip& trip) {
  const Share own = block(ranks_.node(), trip.chunk);
  if (own.begin == own.end) return;
  char* const result = slot(trip.chunk) + own.begin;
  std::vector<const void*> sources;
  for (int node = 0; node < board_.shape().nodes; ++node) {
    sources.push_back(node == ranks_.node() ? result : collected(node, trip.first_place));
  }
  reduce_for_device({.dtype = job_.dtype,
                     .op = job_.nodes_op,
                     .sources = sources.data(),
                     .num_sources = board_.shape().nodes,
                     .divisor = job_.nodes_divisor,
                     .count = (own.end - own.begin) / size_of(job_.dtype),
                     .destination = result});
}

// The devices may fetch it.
void InternodeSender::tell(const Trip& trip) {
  const uint64_t number = number_of(trip.chunk);
  const size_t place = number % board_.shape().depth;
  const int first = job_.collects ? 0 : ranks_.local();
  const int last = job_.collects ? board_.shape().ranks - 1 : ranks_.local();
  for (int rank = first; rank <= last; ++rank) {
    board_.ready(rank, place).store(low(number), std::memory_order_release);
  }
}

}  // namespace dpt::staged
