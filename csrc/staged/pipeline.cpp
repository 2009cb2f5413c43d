#include "staged/pipeline.hpp"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/error.hpp"
#include "host/reduce_for_device.hpp"
#include "staged/internode/internode_sender.hpp"
#include "staged/sanitizer.hpp"
#include "staged/workers.hpp"

namespace dpt::staged {
namespace {

// Ahead of every number that a wait is for, and still ahead of it in has_come_to.
constexpr uint32_t kFarAhead = 1u << 30;
// How often waits are ended anew while devices undo it.
constexpr std::chrono::milliseconds kEndAgain{1};

// A rank's own node knows best what the rank is doing. The node says so within this time after its
// timeout. The time is for two looks of its watchdog and the way through the network.
constexpr std::chrono::milliseconds kGraceBetweenNodes{1000};

// The largest pitch that drivers take.
constexpr ptrdiff_t kMostPitch = (ptrdiff_t{1} << 31) - 1;

// `broken`'s value.
constexpr uint32_t encode(uint32_t kind, int peer) {
  return kind | static_cast<uint32_t>(peer) << 8;
}

// From where an exception is being handled.
void tell_cause(const StartHooks& hooks) {
  if (!hooks.failed) return;
  try {
    throw;
  } catch (const Error& error) {
    hooks.failed(error);
  } catch (const std::exception& error) {
    hooks.failed(Error(DPT_ERR_SYSTEM, error.what()));
  }
}

}  // namespace

Pipeline::Pipeline(Board board,
                   Membership ranks,
                   Workers& workers,
                   CopyEngine& engine,
                   std::unique_ptr<InternodeSender> sender)
    : board_(std::move(board)),
      ranks_(std::move(ranks)),
      rank_(ranks_.local()),
      workers_(workers),
      engine_(engine),
      sender_(std::move(sender)),
      next_chunk_(board.shape().first_chunk),
      cursors_(workers.size()) {
  // Workers begin behind an operation that is over.
  ops_.push_back(std::make_unique<Op>());
  ops_.back()->users = workers.size();
  for (Cursor& cursor : cursors_) cursor.op = ops_.back().get();
}

Pipeline::~Pipeline() = default;

// ---- What the device does ----

void Pipeline::enqueue(const std::vector<Job>& parts,
                       std::chrono::milliseconds timeout,
                       Stream stream,
                       const StartHooks& hooks) {
  if (is_broken()) {
    throw Error(DPT_ERR_ABORTED, "the group's operations on GPUs were broken off");
  }
  const uint32_t number = last_number_.load(std::memory_order_relaxed) + 1;
  last_number_.store(number, std::memory_order_release);
  for (const Job& part : parts) {
    const bool is_first = &part == &parts.front();
    auto appended = std::make_unique<Op>();
    appended->job = part;
    appended->number = number;
    appended->is_last = &part == &parts.back();
    appended->timeout = timeout;
    Op& op = append(std::move(appended));
    try {
      op.rows = rows_of(part);
      put_on_lanes(op, stream, is_first ? hooks : StartHooks{});
    } catch (...) {
      tell_cause(hooks);
      // Some of it is on its way, and the other ranks wait for the rest. Nor may the stream go on
      // before what uses its buffers has ended.
      break_off(Failure::kAborted, ranks_.rank);
      try {
        close(op, stream);
      } catch (const Error&) {
        // Then the device carries out nothing any more.
      }
      throw;
    }
  }
}

void Pipeline::put_on_lanes(const Op& op, Stream stream, const StartHooks& hooks) {
  const Job& job = op.job;
  const std::shared_ptr<void> entered = engine_.enter();
  engine_.fork(stream);
  if (hooks.beside) hooks.beside();
  const bool own_is_result = job.kind == Job::Kind::kExchange;
  if (own_is_result && job.own != job.own_to) {
    engine_.copy_local(job.own_to, job.own, job.piece_bytes);
  }
  // The order is one in which each command could wait for the end of the one before. Some devices'
  // lanes share a queue, and a full queue holds up this thread.
  const uint64_t lag = std::min<uint64_t>(board_.shape().depth, job.chunks);
  for (uint64_t step = 0; step < job.chunks + lag; ++step) {
    if (step >= lag) {
      const uint64_t chunk = step - lag;
      const bool keeps_arrival = chunk + Lane::kCount >= std::min(step, job.chunks);
      if (keeps_arrival) engine_.submit({Lane::kUp, lane_of(op.first + chunk)});
      put_down(op, chunk);
    }
    if (step < job.chunks) put_up(op, step);
  }
  if (op.is_last) return close(op, stream);
  // The next part begins where all of this one has ended.
  engine_.meet();
  engine_.join(stream);
}

// Puts the gate behind all of the operation, and then the stream goes on.
void Pipeline::close(const Op& op, Stream stream) {
  const std::shared_ptr<void> entered = engine_.enter();
  const Lane last{Lane::kDown, 0};
  engine_.meet();
  engine_.wait_for_bits(last, board_.gate(rank_), kRunning | kReleased);
  engine_.write(last, board_.finished(rank_), op.number);
  engine_.join(stream);
}

Pipeline::Op& Pipeline::append(std::unique_ptr<Op> op) {
  while (ops_.size() > 1 && ops_.front()->users.load(std::memory_order_acquire) == 0) {
    ops_.pop_front();
  }
  op->first = next_chunk_.load(std::memory_order_relaxed);
  op->users = workers_.size();
  next_chunk_.store(op->first + op->job.chunks, std::memory_order_release);
  Op& appended = *op;
  ops_.push_back(std::move(op));
  ops_[ops_.size() - 2]->next.store(&appended, std::memory_order_release);
  workers_.wake();
  return appended;
}

// Chunk `number` may overwrite this rank's slot once what was in it was read by all.
void Pipeline::wait_for_slot(uint64_t number, Job::Kind kind) {
  const size_t slot = slot_of(number);
  const Lane lane{Lane::kUp, lane_of(number)};
  const Job::Kind last = kinds_[slot];
  kinds_[slot] = kind;
  if (!has_predecessor(number)) return;
  if (last == Job::Kind::kReduce) {
    const Word& read = sender_ ? board_.reduced(slot) : board_.ready(rank_, slot);
    engine_.wait(lane, read, low(before(number)));
    return;
  }
  for (int peer = 0; peer < board_.shape().ranks; ++peer) {
    // Its own lane might not have said yet that it came there, where that is all it does.
    const bool came = peer == rank_ && !sender_;
    const Word& word = came ? board_.arrived(peer, slot) : board_.taken(peer, slot);
    engine_.wait(lane, word, low(before(number)));
  }
}

void Pipeline::put_up(const Op& op, uint64_t chunk) {
  const Job& job = op.job;
  const uint64_t number = op.first + chunk;
  const size_t slot = slot_of(number);
  const Lane lane{Lane::kUp, lane_of(number)};
  wait_for_slot(number, job.kind);
  if (chunk == 0) {
    const auto factor = std::bit_cast<uint64_t>(job.factor);
    engine_.write(lane, board_.description(rank_, slot), job.description);
    if (job.op == DPT_PREMUL_SUM) {
      engine_.write(lane, board_.factor_low(rank_, slot), low(factor));
      engine_.write(lane, board_.factor_high(rank_, slot), low(factor >> 32));
    }
  }
  copy_up(op, chunk, board_.input(rank_, slot));
  engine_.write(lane, board_.arrived(rank_, slot), low(number));
  if (job.pieces.empty()) engine_.submit(lane);  // no copy to come takes it along
}

// Pieces of one tensor lie at equal distances, and then one command copies them. So may tensors of
// their own, which some devices' commands refuse: those ask for one allocation.
std::vector<size_t> Pipeline::rows_of(const Job& job) {
  const std::vector<const char*>& pieces = job.pieces;
  const std::shared_ptr<void> entered = engine_.enter();
  std::vector<size_t> rows;
  for (size_t first = 0, end = 0; first < pieces.size(); first = end) {
    end = first + 1;
    if (end < pieces.size()) {
      const ptrdiff_t distance = pieces[end] - pieces[first];
      while (end < pieces.size() && pieces[end] - pieces[end - 1] == distance) ++end;
      const size_t bytes = pieces[end - 1] - pieces[first] + job.piece_bytes;
      const bool fits = distance >= static_cast<ptrdiff_t>(job.piece_bytes) &&
                        distance <= kMostPitch && engine_.is_one(pieces[first], bytes);
      if (!fits) end = first + 1;
    }
    rows.push_back(end - first);
  }
  return rows;
}

void Pipeline::copy_up(const Op& op, uint64_t chunk, char* to) {
  const Job& job = op.job;
  const size_t bytes = job.bytes(chunk);
  if (bytes == 0) return;
  const size_t pitch = job.pitch(chunk);
  size_t first = 0;
  for (const size_t count : op.rows) {
    const char* const from = job.pieces[first];
    const size_t distance = count > 1 ? job.pieces[first + 1] - from : bytes;
    char* const place = to + (job.first_piece + first) * pitch;
    engine_.copy_up(lane_of(op.first + chunk),
                    place,
                    from + job.offset(chunk),
                    {count, bytes, pitch, distance});
    first += count;
  }
}

void Pipeline::put_down(const Op& op, uint64_t chunk) {
  const Job& job = op.job;
  const uint64_t number = op.first + chunk;
  const size_t slot = slot_of(number);
  const Lane lane{Lane::kDown, lane_of(number)};
  const bool reduces = job.kind == Job::Kind::kReduce;
  if (reduces) {
    engine_.wait(lane, board_.ready(rank_, slot), low(number));
  } else {
    // Every lane's first one.
    if (chunk < Lane::kCount) engine_.wait(lane, board_.checked(rank_), low(op.first));
    // Without anything to take, this lane would overtake the other.
    if (has_predecessor(number)) {
      engine_.wait(lane, board_.taken(rank_, slot), low(before(number)));
    }
  }
  const bool adds = job.kind == Job::Kind::kReduceOnDevice;
  const size_t bytes = job.bytes(chunk);
  const size_t pitch = job.pitch(chunk);
  char* buffered = adds ? engine_.buffer(lane.index) : nullptr;
  for (const Job::Download& download : job.downloads) {
    const Word& there = download.travelled ? board_.ready(download.from, slot)
                                           : board_.arrived(download.from, slot);
    if (!reduces) engine_.wait(lane, there, low(number));
    const char* const from = reduces ? board_.result(slot) : board_.input(download.from, slot);
    if (bytes == 0) continue;
    char* const to = adds ? buffered : download.to + job.offset(chunk);
    engine_.copy_down(lane.index, to, from + download.piece * pitch, {1, bytes, bytes, bytes});
    buffered += adds ? pitch : 0;
  }
  engine_.write(lane, board_.taken(rank_, slot), low(number));
  if (!reduces) engine_.submit(lane);  // the peers' devices wait for that
  if (adds && bytes != 0) {
    // The output may be the input, which must be on its way to the others by then.
    engine_.wait(lane, board_.arrived(rank_, slot), low(number));
    engine_.reduce(lane.index,
                   {.dtype = job.dtype,
                    .op = job.op,
                    .rank = rank_,
                    .ranks = board_.shape().ranks,
                    .own = job.own + job.offset(chunk),
                    .others = engine_.buffer(lane.index),
                    .pitch = pitch,
                    .to = job.own_to + job.offset(chunk),
                    .bytes = bytes});
  }
}

// ---- What workers do ----

Pipeline::Progress Pipeline::advance(int worker) {
  Cursor& at = cursors_[worker];
  if (at.is_over) {
    Op* const next = at.op->next.load(std::memory_order_acquire);
    if (next == nullptr) return Progress::kIdle;
    at.op->users.fetch_sub(1, std::memory_order_acq_rel);
    at.op = next;
    at.is_over = false;
    at.chunk = 0;
    at.started.reset();
  }
  if (is_broken()) return leave_broken(at, worker);
  const Job& job = at.op->job;
  if (worker >= job.threads && worker != 0) {
    at.is_over = true;
    return Progress::kMoved;
  }
  if (!has_begun(*at.op, worker)) return worker == 0 ? Progress::kWaiting : Progress::kIdle;
  if (worker == 0 && sender_ && carry(at)) return Progress::kMoved;
  const bool reduces = job.kind == Job::Kind::kReduce;
  if (reduces && at.chunk < job.chunks && reduce_chunk(at, worker)) return Progress::kMoved;
  if (!reduces && at.chunk == 0 && check_alone(at)) return Progress::kMoved;
  // The first one stays to the end and sees to it that there is one.
  if (worker == 0) {
    watch(at);
  } else {
    at.is_over = at.chunk == job.chunks;
  }
  return at.is_over ? Progress::kMoved : Progress::kWaiting;
}

// Programs enqueue long before devices get there. Meanwhile the first worker alone looks out.
bool Pipeline::has_begun(Op& op, int worker) const {
  if (op.begun.load(std::memory_order_acquire)) return true;
  if (worker != 0) return false;
  const size_t slot = slot_of(op.first);
  for (int rank = 0; rank < board_.shape().ranks; ++rank) {
    const uint32_t arrived = board_.arrived(rank, slot).load(std::memory_order_acquire);
    if (!has_come_to(arrived, low(op.first))) continue;
    op.begun.store(true, std::memory_order_release);
    workers_.wake();
    return true;
  }
  return false;
}

bool Pipeline::all_came_to(Word& (Board::*word)(int, size_t) const, uint64_t number) const {
  for (int rank = 0; rank < board_.shape().ranks; ++rank) {
    const uint32_t value = (board_.*word)(rank, slot_of(number)).load(std::memory_order_acquire);
    if (!has_come_to(value, low(number))) return false;
  }
  return !is_broken();  // where words say whatever ends waits
}

// Once all ranks came to the operation's first chunk. False: they are not in the same.
bool Pipeline::start(Cursor& at, int worker) {
  const Job& job = at.op->job;
  const size_t slot = slot_of(at.op->first);
  at.factors.clear();
  for (int rank = 0; rank < board_.shape().ranks; ++rank) {
    // Its own, the device may have written over already.
    if (worker == 0 && rank != rank_ &&
        board_.description(rank, slot).load(std::memory_order_relaxed) != job.description) {
      break_off(Failure::kMismatch, ranks_.layout.ranks[ranks_.node()][rank]);
      return false;
    }
    if (job.op != DPT_PREMUL_SUM) continue;
    const uint64_t high = board_.factor_high(rank, slot).load(std::memory_order_relaxed);
    const uint64_t bits =
        high << 32 | board_.factor_low(rank, slot).load(std::memory_order_relaxed);
    at.factors.push_back(std::bit_cast<double>(bits));
  }
  return true;
}

bool Pipeline::reduce_chunk(Cursor& at, int worker) {
  const Job& job = at.op->job;
  const Shape& shape = board_.shape();
  const uint64_t number = at.op->first + at.chunk;
  // The result's slot is free once all ranks have what was in it.
  if (!all_came_to(&Board::arrived, number)) return false;
  if (has_predecessor(number) && !all_came_to(&Board::taken, before(number))) return false;
  if (at.chunk == 0 && !start(at, worker)) return false;

  const size_t slot = slot_of(number);
  const size_t bytes = job.bytes_of_slot(at.chunk);
  const int all = shape.ranks * job.threads;
  const Share share = share_of(bytes, rank_ * job.threads + worker, all);
  if (share.begin < share.end) {
    at.sources.clear();
    for (int rank = 0; rank < shape.ranks; ++rank) {
      at.sources.push_back(board_.input(rank, slot) + share.begin);
    }
    reduce_for_device({.dtype = job.dtype,
                       .op = job.op,
                       .sources = at.sources.data(),
                       .num_sources = shape.ranks,
                       .factors = at.factors.empty() ? nullptr : at.factors.data(),
                       .count = (share.end - share.begin) / size_of(job.dtype),
                       .destination = board_.result(slot) + share.begin});
  }
  // The last one to count sees what all others wrote, and has nobody beside it.
  Word& counted = board_.counted(slot);
  tell_sanitizer_of_write();
  if (counted.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(all)) {
    counted.store(0, std::memory_order_relaxed);
    if (sender_) {
      board_.reduced(slot).store(low(number), std::memory_order_release);
    } else {
      for (int rank = 0; rank < shape.ranks; ++rank) {
        board_.ready(rank, slot).store(low(number), std::memory_order_release);
      }
    }
  }
  ++at.chunk;
  return true;
}

bool Pipeline::check_alone(Cursor& at) {
  if (!all_came_to(&Board::arrived, at.op->first) || !start(at, 0)) return false;
  at.chunk = at.op->job.chunks;
  board_.checked(rank_).store(low(at.op->first), std::memory_order_release);
  return true;
}

// Moves what is to cross the network, as far as it can go now.
bool Pipeline::carry(Cursor& at) {
  try {
    const bool moved = sender_->advance(at.op->job, at.op->first);
    if (sender_->other() >= 0) break_off(Failure::kMismatch, sender_->other());
    return moved;
  } catch (const Error& error) {
    sender_->tell_trouble(error);
    break_off(Failure::kAborted, ranks_.rank);
    return true;
  }
}

// A part that others follow has ended when every lane down has taken its last chunk.
bool Pipeline::has_ended(const Op& op) const {
  if (op.is_last) {
    const uint32_t finished = board_.finished(rank_).load(std::memory_order_acquire);
    return has_come_to(finished, op.number) && (!sender_ || sender_->is_through(op.first));
  }
  const uint64_t end = op.first + op.job.chunks;
  for (uint64_t last = std::max(op.first, end - Lane::kCount); last < end; ++last) {
    const Word& taken = board_.taken(rank_, slot_of(last));
    if (!has_come_to(taken.load(std::memory_order_acquire), low(last))) return false;
  }
  return !is_broken();
}

void Pipeline::watch(Cursor& at) {
  if (has_ended(*at.op)) {
    at.is_over = true;
    if (at.op->is_last) seen_to_the_end_.store(at.op->number, std::memory_order_release);
    return;
  }
  // It takes its time from when the device came to it.
  if (!at.started) {
    const Word& word = board_.arrived(rank_, slot_of(at.op->first));
    // Its slot may be on the way to the next chunk already.
    const uint32_t arrived = word.load(std::memory_order_acquire);
    if (has_come_to(arrived, low(at.op->first))) at.started = Clock::now();
    return;
  }
  const auto waited = Clock::now() - *at.started;
  if (waited < at.op->timeout) return;
  const uint64_t chunk = std::min(at.chunk, at.op->job.chunks - 1);
  const int late = who_is_late(at.op->first + chunk);
  const bool elsewhere = ranks_.layout.node_of[late] != ranks_.node();
  if (elsewhere && waited < at.op->timeout + kGraceBetweenNodes) return;
  break_off(Failure::kTimeout, late);
}

// The rank that is furthest behind, among those that have not come to the chunk: the others may
// wait for its slots. -1: all have.
int Pipeline::furthest_behind(Word& (Board::*word)(int, size_t) const, uint64_t number) const {
  const auto lag_of = [&](int rank) {
    int32_t least = std::numeric_limits<int32_t>::max();
    for (int slot = 0; slot < board_.shape().depth; ++slot) {
      const uint32_t value = (board_.*word)(rank, slot).load(std::memory_order_acquire);
      least = std::min(least, static_cast<int32_t>(low(number) - value));
    }
    return least;
  };
  int last = -1;
  int32_t most = 0;
  for (int step = 1; step <= board_.shape().ranks; ++step) {
    const int rank = (rank_ + step) % board_.shape().ranks;  // itself only where no other is as far
    const int32_t lag = lag_of(rank);
    if (lag > most) {
      most = lag;
      last = rank;
    }
  }
  return last;
}

int Pipeline::who_is_late(uint64_t number) const {
  const std::vector<int>& here = ranks_.layout.ranks[ranks_.node()];
  const int late = furthest_behind(&Board::arrived, number);
  if (late >= 0) return here[late];
  const int awaited = sender_ ? sender_->awaited() : -1;
  if (awaited >= 0) return awaited;
  const int slow = furthest_behind(&Board::taken, number);
  return slow >= 0 ? here[slow] : ranks_.rank;
}

// ---- When it is broken ----

void Pipeline::break_off(Failure::Kind kind, int peer) {
  uint32_t whole = 0;
  board_.broken().compare_exchange_strong(whole, encode(kind, peer), std::memory_order_acq_rel);
  end_waits();
}

void Pipeline::end_waits() {
  // First the gates, also where the one that broke it is about to do so.
  for (int rank = 0; rank < board_.shape().ranks; ++rank) {
    uint32_t running = kRunning;
    board_.gate(rank).compare_exchange_strong(running, kHeld, std::memory_order_seq_cst);
  }
  const uint32_t far = low(next_chunk_.load(std::memory_order_acquire)) + kFarAhead;
  for (int slot = 0; slot < board_.shape().depth; ++slot) {
    board_.reduced(slot).store(far, std::memory_order_release);
  }
  for (int rank = 0; rank < board_.shape().ranks; ++rank) {
    board_.checked(rank).store(far, std::memory_order_release);
    for (int slot = 0; slot < board_.shape().depth; ++slot) {
      board_.arrived(rank, slot).store(far, std::memory_order_release);
      board_.taken(rank, slot).store(far, std::memory_order_release);
      board_.ready(rank, slot).store(far, std::memory_order_release);
    }
  }
}

Pipeline::Progress Pipeline::leave_broken(Cursor& at, int worker) {
  if (worker == 0 && sender_) sender_->cancel();
  const uint32_t finished = board_.finished(rank_).load(std::memory_order_acquire);
  at.is_over = worker != 0 || has_come_to(finished, at.op->number);
  if (at.is_over) return Progress::kMoved;
  if (const auto now = Clock::now(); now - at.waits_ended > kEndAgain) {
    at.waits_ended = now;
    end_waits();
  }
  return Progress::kWaiting;
}

std::optional<Pipeline::Failure> Pipeline::failure() const {
  const uint32_t broken = board_.broken().load(std::memory_order_acquire);
  if (broken == 0 || board_.gate(rank_).load(std::memory_order_acquire) == kRunning) {
    return std::nullopt;
  }
  // Operations that ended before that have their results. What passed a released gate has none,
  // which was told before.
  if (is_done()) return std::nullopt;
  const uint32_t finished = board_.finished(rank_).load(std::memory_order_acquire);
  return Failure{
      static_cast<Failure::Kind>(broken & 255), static_cast<int>(broken >> 8), finished + 1};
}

void Pipeline::release() {
  uint32_t held = kHeld;
  board_.gate(rank_).compare_exchange_strong(held, kReleased, std::memory_order_acq_rel);
}

bool Pipeline::is_done() const {
  return board_.finished(rank_).load(std::memory_order_acquire) ==
         last_number_.load(std::memory_order_acquire);
}

bool Pipeline::is_quiet() const {
  return is_done() && (!sender_ || seen_to_the_end_.load(std::memory_order_acquire) ==
                                       last_number_.load(std::memory_order_acquire));
}

}  // namespace dpt::staged
