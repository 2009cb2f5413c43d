#include "transport/shm/segment.hpp"

#include <linux/futex.h>
#include <sched.h>
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "base/error.hpp"
#include "transport/shm/mailbox.hpp"

namespace dpt {
namespace {

constexpr int kMaxRanks = 128;
constexpr uint32_t kMagic = 0x64707434;  // "dpt4": version of this layout
constexpr size_t kPage = 4096;

struct alignas(kCacheLine) Line {
  std::atomic<uint32_t> value;
};

// Per rank; the counters are written by their rank alone.
struct alignas(kCacheLine) RankState {
  std::atomic<uint64_t> barriers;
  std::atomic<uint32_t> left;
  std::atomic<uint32_t> waits_elsewhere;  // see set_waits_elsewhere
  std::atomic<int64_t> heartbeat_ms;      // on the clock of monotonic_ms
  alignas(kCacheLine) OpHeader header[2];
  Line doorbell;
  Line asleep;  // threads of this rank that sleep on its doorbell
  std::atomic<uint32_t> stock_failed;
  char stock_failure[236];  // of which the last stays zero
};

void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: the word is shared between processes.
void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, std::chrono::milliseconds slice) {
  const timespec time{slice.count() / 1000, (slice.count() % 1000) * 1000000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, expected, &time, nullptr, 0);
}

// The same clock in every process of the machine.
int64_t monotonic_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Without a beat for so long a process is not merely busy: five ticks of the watchdog.
constexpr std::chrono::milliseconds kSilence{1000};

// Such a rank's report about the other node, at its own time limit, reaches the others within this.
constexpr std::chrono::milliseconds kGraceForElsewhere{400};
// For the few words of an abort; who takes longer has died over them.
constexpr std::chrono::milliseconds kWritingLimit{200};

// NOTE [Thread sanitizer] It knows memory by its address. Ranks that are threads, as in tests, see
// the segment at an address each, but registered memory at one. So the sanitizer can't tell that a
// barrier orders them. It is told so, for all groups of the process together.
#if defined(__SANITIZE_THREAD__)
char sanitizer_token;
void tell_sanitizer_of_arrival() { __tsan_release(&sanitizer_token); }
void tell_sanitizer_of_passing() { __tsan_acquire(&sanitizer_token); }
#else
void tell_sanitizer_of_arrival() {}
void tell_sanitizer_of_passing() {}
#endif

enum AbortState : uint32_t { kRunning = 0, kWriting = 1, kAborted = 2 };

}  // namespace

struct Segment::Shared {
  uint32_t magic;
  int32_t size;
  uint64_t max_chunk_bytes;
  alignas(kCacheLine) std::atomic<uint32_t> arrived;
  Line epoch;
  Line sleepers;
  alignas(kCacheLine) std::atomic<uint32_t> abort_state;
  int32_t abort_status;
  char abort_reason[480];
  std::atomic<uint32_t> rendezvous_words[kNumRendezvous];
  RankState ranks[kMaxRanks];
};

// The parts begin here after `Shared`; each is an array over (parity, rank).
struct Segment::Layout {
  size_t buffers, small, slots, results, mailboxes, end;

  Layout(int size, size_t max_chunk_bytes)
      : buffers(round_up(sizeof(Shared), kPage)),
        small(buffers + round_up(2 * size * buffers_of_rank(size), kPage)),
        slots(small + 2 * size * kSmallBytes),
        results(slots + 2 * size * max_chunk_bytes),
        mailboxes(round_up(results + 2 * max_chunk_bytes, kPage)),
        end(mailboxes + Mailbox::area_bytes(size)) {}

  static size_t buffers_of_rank(int size) {
    return round_up(2 * size * sizeof(BufferInfo), kCacheLine);
  }
};

namespace {

// Spins or yields as `style` says; true when `word` moved on from `now`.
bool passed_before_sleep(const std::atomic<uint32_t>& word,
                         uint32_t now,
                         WaitStyle style,
                         AdaptiveSpin& spin) {
  constexpr int kBackgroundPauses = 200;
  constexpr int kHandOvers = 3;
  auto passed = [&] { return word.load(std::memory_order_acquire) != now; };
  if (style == WaitStyle::kSharedCore) {
    for (int i = 0; i < kHandOvers; ++i) {
      if (passed()) return true;
      sched_yield();
    }
    return passed();
  }
  const bool adaptive = style == WaitStyle::kOwnCore;
  const int limit = adaptive ? spin.limit() : kBackgroundPauses;
  for (int i = 0; i < limit; ++i) {
    if (passed()) {
      if (adaptive) spin.ended_after(i);
      return true;
    }
    cpu_relax();
  }
  if (adaptive) spin.slept();
  return passed();
}

}  // namespace

int AdaptiveSpin::limit() {
  // Once in a while the full length, or a limit that fell too low would never be found wrong.
  return ++waits_ % 32 == 0 ? kMost : limit_;
}

void AdaptiveSpin::ended_after(int pauses) {
  const int enough = std::clamp(2 * pauses + kLeast, kLeast, kMost);
  limit_ = enough > limit_ ? enough : limit_ - (limit_ - enough) / 16;
}

void AdaptiveSpin::slept() { limit_ = std::max(kLeast, limit_ / 2); }

int Segment::create_file(int size, size_t max_chunk_bytes) {
  DPT_CHECK(max_chunk_bytes >= kMinChunkBytes && max_chunk_bytes % kPage == 0);
  if (size > kMaxRanks) {
    throw Error(DPT_ERR_SYSTEM,
                "a group of " + std::to_string(size) +
                    " ranks on one node; the shared-memory "
                    "transport serves " +
                    std::to_string(kMaxRanks));
  }
  const int fd = DPT_SYS_CHECK(
      static_cast<int>(syscall(SYS_memfd_create, "deepytorch", 1u /* MFD_CLOEXEC */)));
  if (ftruncate(fd, static_cast<off_t>(Layout(size, max_chunk_bytes).end)) != 0) {
    close(fd);
    throw_system_error("ftruncate of the group's shared memory");
  }
  // Fresh pages are zero, which is every field's initial state; only these differ.
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    close(fd);
    throw_system_error("mmap of the group's shared memory");
  }
  auto* shared = static_cast<Shared*>(memory);
  shared->magic = kMagic;
  shared->size = size;
  shared->max_chunk_bytes = max_chunk_bytes;
  munmap(memory, sizeof(Shared));
  return fd;
}

Segment::Segment(int fd, int rank, const std::vector<int64_t>& global_ranks)
    : rank_(rank), size_(static_cast<int>(global_ranks.size())), global_ranks_(global_ranks) {
  struct stat info{};
  if (fstat(fd, &info) != 0 || static_cast<size_t>(info.st_size) < sizeof(Shared)) {
    close(fd);
    throw Error(DPT_ERR_SYSTEM, "the group's shared memory has an unexpected size");
  }
  bytes_ = static_cast<size_t>(info.st_size);
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) throw_system_error("mmap of the group's shared memory");
  // A forked child (a DataLoader worker) must neither keep nor touch this memory.
  madvise(memory, bytes_, MADV_DONTFORK);
  shared_ = static_cast<Shared*>(memory);
  if (shared_->magic != kMagic || shared_->size != size_) {
    munmap(memory, bytes_);
    throw Error(DPT_ERR_SYSTEM,
                "the group's shared memory has another layout: is the same version of deepytorch "
                "installed on every rank?");
  }
  max_chunk_bytes_ = shared_->max_chunk_bytes;
  layout_ = std::make_unique<Layout>(size_, max_chunk_bytes_);
  beat();
}

Segment::~Segment() { munmap(shared_, bytes_); }

OpHeader& Segment::header(int rank, int parity) { return shared_->ranks[rank].header[parity]; }

BufferInfo* Segment::inputs(int rank, int parity) const {
  const size_t offset = (parity * size_ + rank) * Layout::buffers_of_rank(size_);
  return reinterpret_cast<BufferInfo*>(at(layout_->buffers + offset));
}

BufferInfo* Segment::outputs(int rank, int parity) const { return inputs(rank, parity) + size_; }

char* Segment::small(int rank, int parity) const {
  return at(layout_->small + (parity * size_ + rank) * kSmallBytes);
}

char* Segment::slot(int rank, int parity) const {
  return at(layout_->slots + (parity * size_ + rank) * max_chunk_bytes_);
}

char* Segment::result(int parity) const { return at(layout_->results + parity * max_chunk_bytes_); }

char* Segment::mailboxes() const { return at(layout_->mailboxes); }

void Segment::ring(int rank) {
  RankState& peer = shared_->ranks[rank];
  peer.doorbell.value.fetch_add(1, std::memory_order_seq_cst);
  // Pairs with the sleeper's increment before its futex_wait re-reads the doorbell.
  if (peer.asleep.value.load(std::memory_order_seq_cst) != 0) futex_wake_all(&peer.doorbell.value);
}

uint32_t Segment::rings() const {
  return shared_->ranks[rank_].doorbell.value.load(std::memory_order_acquire);
}

void Segment::await_ring(uint32_t seen,
                         std::chrono::milliseconds slice,
                         WaitStyle style,
                         AdaptiveSpin& spin) {
  RankState& me = shared_->ranks[rank_];
  if (passed_before_sleep(me.doorbell.value, seen, style, spin)) return;
  me.asleep.value.fetch_add(1, std::memory_order_seq_cst);
  futex_wait(&me.doorbell.value, seen, slice);
  me.asleep.value.fetch_sub(1, std::memory_order_seq_cst);
}

void Segment::set_pools(const MemoryPool* own, std::vector<char*> mapped) {
  own_pool_ = own;
  pools_ = std::move(mapped);
}

std::optional<uint64_t> Segment::offset_of(const void* address, size_t bytes) const {
  return own_pool_ == nullptr ? std::nullopt : own_pool_->offset_of(address, bytes);
}

void Segment::barrier(const WaitContext& wait, WaitStyle style) {
  tell_sanitizer_of_arrival();
  meet_all(wait, style);
  tell_sanitizer_of_passing();
}

void Segment::meet_all(const WaitContext& wait, WaitStyle style) {
  std::atomic<uint32_t>& epoch = shared_->epoch.value;
  const uint32_t now = epoch.load(std::memory_order_acquire);
  RankState& me = shared_->ranks[rank_];
  me.barriers.store(me.barriers.load(std::memory_order_relaxed) + 1, std::memory_order_release);

  if (shared_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 ==
      static_cast<uint32_t>(size_)) {
    shared_->arrived.store(0, std::memory_order_relaxed);
    epoch.store(now + 1, std::memory_order_seq_cst);
    // Pairs with the sleeper's increment before its futex_wait re-reads the epoch.
    if (shared_->sleepers.value.load(std::memory_order_seq_cst) != 0) futex_wake_all(&epoch);
    return;
  }

  // In this order: who has passed may have aborted the group since, which is the next one's affair.
  auto passed = [&] {
    const bool was_aborted = aborted();
    if (epoch.load(std::memory_order_acquire) != now) return true;
    if (was_aborted) throw_if_aborted();
    return false;
  };
  if (passed_before_sleep(epoch, now, style, spin_)) return;
  Deadline deadline = wait.deadline;
  bool is_extended = false;
  while (!passed()) {
    shared_->sleepers.value.fetch_add(1, std::memory_order_seq_cst);
    futex_wait(&epoch, now, deadline.next_slice());
    shared_->sleepers.value.fetch_sub(1, std::memory_order_seq_cst);
    if (passed()) return;
    check_left(wait);
    if (wait.interrupted && wait.interrupted()) {
      fail(DPT_ERR_INTERRUPTED, wait.describe() + " was interrupted");
    }
    if (deadline.expired() && !is_extended && missing_wait_elsewhere()) {
      deadline = deadline.later(kGraceForElsewhere);
      is_extended = true;
    }
    if (deadline.expired()) {
      fail(DPT_ERR_TIMEOUT,
           wait.describe() + " timed out after " + std::to_string(wait.deadline.timeout().count()) +
               " ms: " + missing_ranks());
    }
  }
}

void Segment::set_waits_elsewhere(bool waits) {
  shared_->ranks[rank_].waits_elsewhere.store(waits ? 1 : 0, std::memory_order_release);
}

bool Segment::missing_wait_elsewhere() const {
  const uint64_t mine = shared_->ranks[rank_].barriers.load(std::memory_order_relaxed);
  bool some = false;
  for (int peer = 0; peer < size_; ++peer) {
    const RankState& state = shared_->ranks[peer];
    if (state.barriers.load(std::memory_order_acquire) >= mine) continue;
    if (state.waits_elsewhere.load(std::memory_order_acquire) == 0) return false;
    some = true;
  }
  return some;
}

std::string Segment::missing_ranks() const {
  const uint64_t mine = shared_->ranks[rank_].barriers.load(std::memory_order_relaxed);
  std::string alive;
  std::string silent;
  for (int peer = 0; peer < size_; ++peer) {
    if (shared_->ranks[peer].barriers.load(std::memory_order_acquire) >= mine) continue;
    const std::chrono::milliseconds silence = silent_for(peer);
    std::string& list = silence < kSilence ? alive : silent;
    list += (list.empty() ? "" : ", ") + std::to_string(global_ranks_[peer]);
    if (silence >= kSilence) list += " (for " + std::to_string(silence.count() / 1000) + " s)";
  }
  std::string text;
  if (!alive.empty()) {
    text = "rank(s) " + alive +
           " did not come, though alive: was this call skipped there, or is the rank busy?";
  }
  if (!silent.empty()) {
    text += (text.empty() ? "rank(s) " : " Rank(s) ") + silent +
            " did not come and show no sign of life: stopped or frozen?";
  }
  return text.empty() ? "by now all ranks have come; a longer timeout would have been enough"
                      : text;
}

void Segment::check_left(const WaitContext& wait) {
  const uint64_t mine = shared_->ranks[rank_].barriers.load(std::memory_order_relaxed);
  for (int peer = 0; peer < size_; ++peer) {
    const RankState& state = shared_->ranks[peer];
    if (!has_left(peer)) continue;
    if (state.barriers.load(std::memory_order_acquire) >= mine) continue;
    fail(DPT_ERR_PEER_LOST,
         wait.describe() + ": rank " + std::to_string(global_ranks_[peer]) + kHasLeft +
             " and will not come");
  }
}

void Segment::fail(dpt_status status, const std::string& reason) {
  abort(status, reason);
  throw Error(status, reason);
}

bool Segment::abort(dpt_status status, const std::string& reason) {
  uint32_t expected = kRunning;
  const bool is_first = shared_->abort_state.compare_exchange_strong(expected, kWriting);
  if (is_first) {
    shared_->abort_status = status;
    std::strncpy(shared_->abort_reason, reason.c_str(), sizeof shared_->abort_reason - 1);
    shared_->abort_state.store(kAborted, std::memory_order_release);
  }
  futex_wake_all(&shared_->epoch.value);
  for (int rank = 0; rank < size_; ++rank) ring(rank);
  return is_first;
}

bool Segment::aborted() const {
  return shared_->abort_state.load(std::memory_order_acquire) != kRunning;
}

std::atomic<uint32_t>& Segment::rendezvous(int place) const {
  return shared_->rendezvous_words[place];
}

void Segment::throw_if_aborted() const {
  if (!aborted()) return;
  // The writer may be between claiming and publishing; if it died there, go on without its text.
  const auto until = std::chrono::steady_clock::now() + kWritingLimit;
  while (shared_->abort_state.load(std::memory_order_acquire) == kWriting &&
         std::chrono::steady_clock::now() < until) {
    sched_yield();
  }
  if (shared_->abort_state.load(std::memory_order_acquire) != kAborted) {
    throw Error(DPT_ERR_ABORTED, "the group was aborted by a rank that died while saying why");
  }
  const auto status = static_cast<dpt_status>(shared_->abort_status);
  // An interrupt or timeout belongs to the rank it happened on; for the others it is an abort.
  throw Error(status == DPT_ERR_PEER_LOST ? DPT_ERR_PEER_LOST : DPT_ERR_ABORTED,
              shared_->abort_reason);
}

bool Segment::has_left(int rank) const {
  return shared_->ranks[rank].left.load(std::memory_order_acquire) != 0;
}

void Segment::leave() {
  shared_->ranks[rank_].left.store(1, std::memory_order_release);
  futex_wake_all(&shared_->epoch.value);
  for (int rank = 0; rank < size_; ++rank) ring(rank);
}

void Segment::note_stock_failure(const std::string& why) {
  RankState& mine = shared_->ranks[rank_];
  if (why.empty()) {
    if (mine.stock_failed.load(std::memory_order_relaxed) != 0) mine.stock_failed = 0;
    return;
  }
  std::strncpy(mine.stock_failure, why.c_str(), sizeof mine.stock_failure - 1);
  mine.stock_failed.store(1, std::memory_order_release);
}

std::string Segment::stock_failure(int rank) const {
  const RankState& state = shared_->ranks[rank];
  return state.stock_failed.load(std::memory_order_acquire) != 0 ? state.stock_failure : "";
}

void Segment::beat() {
  std::atomic<int64_t>& mine = shared_->ranks[rank_].heartbeat_ms;
  beaten_before_ms_ = mine.load(std::memory_order_relaxed);
  mine.store(monotonic_ms(), std::memory_order_relaxed);
}

std::chrono::milliseconds Segment::silent_for(int rank) const {
  const int64_t last = shared_->ranks[rank].heartbeat_ms.load(std::memory_order_relaxed);
  // Silence counts until this rank's last beat but one, not until now. A machine that stood still
  // may have kept back this rank's beat and the peer's as well. The peer's beat then comes before
  // the next one here.
  return std::chrono::milliseconds(std::max<int64_t>(0, beaten_before_ms_ - last));
}

}  // namespace dpt
