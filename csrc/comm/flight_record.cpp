#include "comm/flight_record.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <new>

#include "base/log.hpp"
#include "bootstrap/exchange.hpp"

namespace dpt {
namespace {

constexpr size_t kPage = 4096;
// linux/memfd.h and linux/fcntl.h, which libc's headers may lack or clash with.
constexpr unsigned kMemfdFlags = 1u | 2u;  // MFD_CLOEXEC | MFD_ALLOW_SEALING
constexpr int kAddSeals = 1033;            // F_ADD_SEALS
constexpr int kSizeSeals = 1 | 2 | 4;      // F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW

constexpr size_t kGroupsAt = round_up(sizeof(FlightRecord::Header), kPage);
constexpr size_t kPeersAt =
    round_up(kGroupsAt + FlightRecord::kGroups * sizeof(FlightRecord::Group), kPage);
constexpr size_t kPlacesAt =
    round_up(kPeersAt + FlightRecord::kPeers * sizeof(FlightRecord::Peer), kPage);
constexpr size_t kEntriesAt =
    round_up(kPlacesAt + FlightRecord::kPlaces * sizeof(FlightRecord::Place), kPage);
constexpr size_t kBytes =
    round_up(kEntriesAt + FlightRecord::kEntries * sizeof(FlightRecord::Entry), kPage);

// The record's file; apart, because a forked child can't ask for what another thread was making.
std::atomic<int> the_fd{-1};

int64_t now_ns(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

template <size_t kSize>
void put(char (&to)[kSize], const std::string& text) {
  std::memset(to, 0, kSize);
  text.copy(to, kSize - 1);
}

// The end of a text that is too long.
template <size_t kSize>
void put_end(char (&to)[kSize], const std::string& text) {
  put(to, text.size() < kSize ? text : "..." + text.substr(text.size() - (kSize - 4)));
}

template <size_t kSize>
bool holds(const char (&field)[kSize], const std::string& text) {
  return text.substr(0, kSize - 1) == field;
}

bool is_message(int collective) { return collective == DPT_SEND || collective == DPT_RECV; }

// An entry's flags.
constexpr uint8_t kUneven = 1;
constexpr uint8_t kOnDevice = 2;
constexpr uint8_t kAsynchronous = 4;

}  // namespace

FlightRecord& FlightRecord::instance() {
  static auto* const record = new FlightRecord;
  return *record;
}

void FlightRecord::close_after_fork() {
  const int fd = the_fd.exchange(-1);
  if (fd >= 0) close(fd);
}

FlightRecord::FlightRecord() {
  fd_ = static_cast<int>(syscall(SYS_memfd_create, "deepytorch-flight", kMemfdFlags));
  void* memory = MAP_FAILED;
  if (fd_ >= 0 && ftruncate(fd_, kBytes) == 0) {
    fcntl(fd_, kAddSeals, kSizeSeals);  // nobody can make it shorter than what is mapped here
    memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  }
  if (memory == MAP_FAILED) {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
    log(LogLevel::kWarning,
        "no memory for the flight record: a hang of this process can't be explained");
    return;
  }
  madvise(memory, kBytes, MADV_DONTFORK);
  the_fd = fd_;
  memory_ = static_cast<char*>(memory);
  header_ = new (memory_) Header{};
  groups_ = reinterpret_cast<Group*>(memory_ + kGroupsAt);
  peers_ = reinterpret_cast<Peer*>(memory_ + kPeersAt);
  places_ = reinterpret_cast<Place*>(memory_ + kPlacesAt);
  entries_ = reinterpret_cast<Entry*>(memory_ + kEntriesAt);

  Header& header = *header_;
  header.version = kVersion;
  header.header_bytes = kGroupsAt;
  header.group_bytes = sizeof(Group);
  header.peer_bytes = sizeof(Peer);
  header.place_bytes = sizeof(Place);
  header.entry_bytes = sizeof(Entry);
  header.groups = kGroups;
  header.peers = kPeers;
  header.places = kPlaces;
  header.entries = kEntries;
  header.pid = getpid();
  header.global_rank = -1;
  header.started_realtime_ns = now_ns(CLOCK_REALTIME);
  header.started_monotonic_ns = now_ns(CLOCK_MONOTONIC);
  char host[64] = {};
  gethostname(host, sizeof host - 1);
  put(header.host, host);
  put(header.boot_id, PeerInfo::of_this_process().boot_id);
  std::memcpy(header.magic, "dptfly01", sizeof header.magic);  // last: now it can be read
}

void FlightRecord::identify(const Identity& identity) {
  if (header_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  put(header_->job, identity.job);
  header_->global_rank = identity.global_rank;
  header_->world_size = identity.world_size;
  header_->signal = identity.signal;
}

void FlightRecord::note_peer(int64_t global_rank, int64_t pid) {
  if (header_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < kPeers; ++i) {
    const int64_t there = peers_[i].global_rank;
    if (there != 0 && there != global_rank + 1) continue;
    peers_[i].pid = pid;
    peers_[i].global_rank = global_rank + 1;
    return;
  }
}

int FlightRecord::open_group(const std::string& name, const std::vector<int64_t>& global_ranks) {
  if (header_ == nullptr) return -1;
  const std::lock_guard lock(mutex_);
  // One that is still open is of a job of this process that is over: whoever held it kept it.
  for (size_t i = 0; i < kGroups; ++i) {
    if (groups_[i].open != 0 && holds(groups_[i].name, name)) groups_[i].open = 0;
  }
  // A closed group keeps its place as long as there are others.
  int free = -1;
  for (size_t i = 0; i < kGroups; ++i) {
    if (groups_[i].open != 0) continue;
    const bool unused = groups_[i].name[0] == '\0';
    if (free < 0 || unused || holds(groups_[i].name, name)) free = static_cast<int>(i);
    if (unused || holds(groups_[i].name, name)) break;
  }
  if (free < 0) return -1;
  Group& group = groups_[free];
  group.size = static_cast<int32_t>(global_ranks.size());
  group.first_rank = global_ranks.empty() ? 0 : global_ranks[0];
  group.stride = global_ranks.size() > 1 ? global_ranks[1] - global_ranks[0] : 1;
  for (size_t i = 0; i < global_ranks.size(); ++i) {
    const auto offset = static_cast<int64_t>(i) * group.stride;
    if (global_ranks[i] != group.first_rank + offset) group.stride = 0;
  }
  group.listed = 0;
  for (const int64_t rank : global_ranks) {
    if (group.listed == static_cast<int32_t>(kListedRanks)) break;
    group.ranks[group.listed++] = static_cast<int32_t>(rank);
  }
  put(group.description, "");
  put(group.name, name);
  group.collectives = 0;
  group.messages = 0;
  // Another id than whoever had the place before: its operations may still be in the ring.
  constexpr auto kStep = static_cast<int32_t>(kGroups);
  const int32_t last = group.id;
  const int32_t id = last == 0 || last > INT32_MAX - kStep ? free + kStep : last + kStep;
  group.id = id;
  group.open = 1;
  return id;
}

void FlightRecord::close_group(int group) {
  if (Group* const closed = group_of(group)) closed->open = 0;
}

void FlightRecord::describe_group(const std::string& name, const std::string& description) {
  if (header_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < kGroups; ++i) {
    if (groups_[i].open != 0 && holds(groups_[i].name, name)) {
      put(groups_[i].description, description);
    }
  }
}

[[gnu::hot]] FlightRecord::Group* FlightRecord::group_of(int group) const {
  if (header_ == nullptr || group < 0) return nullptr;
  Group* const found = &groups_[group % kGroups];
  return found->id.load(std::memory_order_relaxed) == group ? found : nullptr;
}

[[gnu::hot]] FlightRecord::Entry* FlightRecord::entry_of(uint64_t number) const {
  if (header_ == nullptr || number == 0) return nullptr;
  Entry* const entry = &entries_[(number - 1) % kEntries];
  // Long ago: its place is another's by now.
  return entry->number.load(std::memory_order_acquire) == number ? entry : nullptr;
}

[[gnu::hot]] uint64_t FlightRecord::begin(int group, const dpt_request& request, How how) {
  Group* const mine = group_of(group);
  if (mine == nullptr || paused_.load(std::memory_order_relaxed)) return 0;
  const uint16_t place = request.place != nullptr ? index_of(*request.place) : 0;
  std::atomic<uint64_t>& counter =
      is_message(request.collective) ? mine->messages : mine->collectives;
  const uint64_t sequence = counter.fetch_add(1, std::memory_order_relaxed) + 1;
  const uint64_t number = header_->next.fetch_add(1, std::memory_order_relaxed) + 1;
  Entry& entry = entries_[(number - 1) % kEntries];
  entry.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // the zero comes before what follows
  entry.sequence = sequence;
  entry.entered_ns = now_ns(CLOCK_MONOTONIC);
  entry.ended_ns.store(0, std::memory_order_relaxed);
  entry.count = request.count;
  entry.bytes = request.count * size_of(request.dtype);
  entry.root = request.root;
  entry.tag = request.tag;
  entry.group = group;
  entry.collective = static_cast<uint8_t>(request.collective);
  entry.dtype = static_cast<uint8_t>(request.dtype);
  entry.reduce_op = static_cast<uint8_t>(request.reduce_op);
  const bool uneven = request.input_counts != nullptr || request.output_counts != nullptr;
  const int flags = (uneven ? kUneven : 0) | (request.on_device != 0 ? kOnDevice : 0) |
                    (request.asynchronous != 0 ? kAsynchronous : 0);
  entry.flags.store(static_cast<uint8_t>(flags), std::memory_order_relaxed);
  entry.timeout_ms = request.timeout_ms;
  entry.state.store(kEntered, std::memory_order_relaxed);
  entry.how.store(how, std::memory_order_relaxed);
  entry.place.store(place, std::memory_order_relaxed);
  entry.number.store(number, std::memory_order_release);
  __builtin_prefetch(&entries_[number % kEntries], /*for writing*/ 1);  // the next one's
  return number;
}

void FlightRecord::note(uint64_t number, How how) {
  if (Entry* const entry = entry_of(number)) entry->how.store(how, std::memory_order_relaxed);
}

void FlightRecord::note_place(uint64_t number, const dpt_place& place) {
  if (Entry* const entry = entry_of(number)) {
    entry->place.store(index_of(place), std::memory_order_relaxed);
  }
}

void FlightRecord::note_wait(uint64_t number) {
  if (Entry* const entry = entry_of(number)) {
    entry->flags.fetch_and(static_cast<uint8_t>(~kAsynchronous), std::memory_order_relaxed);
  }
}

int64_t FlightRecord::longest_wait_ns() const {
  if (header_ == nullptr) return 0;
  const uint64_t last = header_->next.load(std::memory_order_relaxed);
  int64_t since = 0;
  for (size_t i = 0; i < kEntries; ++i) {
    const Entry& entry = entries_[i];
    const uint64_t number = entry.number.load(std::memory_order_acquire);
    if (number == 0) continue;
    const Group* const group = group_of(entry.group);
    if (group == nullptr || group->open == 0) continue;
    const uint8_t flags = entry.flags.load(std::memory_order_relaxed);
    const uint8_t state = entry.state.load(std::memory_order_relaxed);
    const bool message = is_message(entry.collective);
    bool waits = false;
    if (state == kEntered) {
      const bool ends_unseen = message || entry.how.load(std::memory_order_relaxed) == kDelegated;
      waits = (flags & kAsynchronous) == 0 || !ends_unseen;
    } else if (state == kIssued) {
      waits = (flags & kOnDevice) != 0 && !message && number == last;
    }
    if (waits && (since == 0 || entry.entered_ns < since)) since = entry.entered_ns;
  }
  return since == 0 ? 0 : std::max<int64_t>(1, now_ns(CLOCK_MONOTONIC) - since);
}

// Two threads that bring the same line at the same time may give it two places.
[[gnu::cold, gnu::noinline]] uint16_t FlightRecord::index_of(const dpt_place& place) {
  Place wanted{};
  put(wanted.function, place.function);
  put_end(wanted.file, place.file);
  for (size_t i = 0; i < kPlaces; ++i) {
    Place& there = places_[i];
    const auto index = static_cast<uint16_t>(i + 1);
    uint32_t state = there.state.load(std::memory_order_acquire);
    if (state == Place::kFree &&
        there.state.compare_exchange_strong(
            state, Place::kBeingWritten, std::memory_order_acquire, std::memory_order_acquire)) {
      there.line = place.line;
      std::memcpy(there.function, wanted.function, sizeof there.function);
      std::memcpy(there.file, wanted.file, sizeof there.file);
      there.state.store(Place::kWritten, std::memory_order_release);
      return index;
    }
    if (state == Place::kWritten && there.line == place.line &&
        std::memcmp(there.function, wanted.function, sizeof there.function) == 0 &&
        std::memcmp(there.file, wanted.file, sizeof there.file) == 0) {
      return index;
    }
  }
  return 0;
}

[[gnu::hot]] void FlightRecord::end(uint64_t number, State state, std::optional<Time> at) {
  Entry* const entry = entry_of(number);
  if (entry == nullptr || entry->state.load(std::memory_order_relaxed) != kEntered) return;
  const int64_t now =
      at ? std::chrono::nanoseconds(at->time_since_epoch()).count() : now_ns(CLOCK_MONOTONIC);
  entry->ended_ns.store(now, std::memory_order_relaxed);
  entry->state.store(state, std::memory_order_release);
}

}  // namespace dpt
