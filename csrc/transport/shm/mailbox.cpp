#include "transport/shm/mailbox.hpp"

#include <atomic>
#include <cstring>

#include "base/error.hpp"
#include "base/types.hpp"

namespace dpt {
namespace {

constexpr size_t kRingBytes = 256 << 10;
constexpr size_t kReplies = 64;
constexpr size_t kSlots = 4;
constexpr size_t kMailboxPage = 4096;

// Counts since the group's beginning; they never wrap.
struct alignas(kCacheLine) Counter {
  std::atomic<uint64_t> value;
};

uint64_t own(const Counter& counter) { return counter.value.load(std::memory_order_relaxed); }
uint64_t others(const Counter& counter) { return counter.value.load(std::memory_order_acquire); }
void publish(Counter& counter, uint64_t value) {
  counter.value.store(value, std::memory_order_release);
}

// How far the two sides of a ring are. Who writes and finds no room leaves word, and whoever reads
// after that rings.
struct Flow {
  Counter written;
  Counter read;
  alignas(kCacheLine) std::atomic<uint32_t> wants_room;

  // The writer's: whether `more` fits into `capacity`.
  bool has_room(uint64_t more, uint64_t capacity) {
    const auto fits = [&] {
      return own(written) + more - read.value.load(std::memory_order_seq_cst) <= capacity;
    };
    if (fits()) return true;
    // Pairs with advance(): either it sees the wish, or we see the room it made.
    wants_room.store(1, std::memory_order_seq_cst);
    return fits();
  }

  // The reader's: true when the writer waits for room.
  bool advance(uint64_t by) {
    read.value.store(own(read) + by, std::memory_order_seq_cst);
    return wants_room.load(std::memory_order_seq_cst) != 0 &&
           wants_room.exchange(0, std::memory_order_seq_cst) != 0;
  }
};

static_assert(sizeof(Letter) <= kCacheLine);

}  // namespace

struct Mailbox::Shared {
  Flow letters_flow;  // in bytes of the ring
  Flow replies_flow;
  Counter slots_written;
  Counter slots_read;
  alignas(kCacheLine) Reply replies[kReplies];
  alignas(kMailboxPage) char ring[kRingBytes];
  alignas(kMailboxPage) char slots[kSlots][kSlotBytes];
};

size_t Mailbox::area_bytes(int size) {
  return sizeof(Shared) * static_cast<size_t>(size) * static_cast<size_t>(size);
}

Mailbox::Mailbox(char* area, int from, int to, int size)
    : shared_(reinterpret_cast<Shared*>(area) + static_cast<size_t>(from) * size + to) {}

bool Mailbox::post(const Letter& letter, const void* content) {
  const size_t needed = kCacheLine + (letter.inside ? round_up(letter.bytes, kCacheLine) : 0);
  Flow& flow = shared_->letters_flow;
  uint64_t written = own(flow.written);
  const size_t to_end = kRingBytes - written % kRingBytes;
  // A letter and its content lie in one piece; what is left before the end is skipped.
  const size_t skipped = to_end < needed ? to_end : 0;
  if (!flow.has_room(skipped + needed, kRingBytes)) return false;
  if (skipped != 0) {
    const Letter filler{.filler = 1};
    std::memcpy(shared_->ring + written % kRingBytes, &filler, sizeof filler);
    written += skipped;
  }
  char* const place = shared_->ring + written % kRingBytes;
  std::memcpy(place, &letter, sizeof letter);
  if (letter.inside && letter.bytes != 0) {
    std::memcpy(place + kCacheLine, content, letter.bytes);
  }
  publish(flow.written, written + needed);
  return true;
}

const Letter* Mailbox::front() {
  Flow& flow = shared_->letters_flow;
  for (;;) {
    const uint64_t read = own(flow.read);
    if (others(flow.written) == read) return nullptr;
    const auto* letter = reinterpret_cast<const Letter*>(shared_->ring + read % kRingBytes);
    if (!letter->filler) return letter;
    // The letters that follow were published together with the filler.
    publish(flow.read, read + kRingBytes - read % kRingBytes);
  }
}

const char* Mailbox::content_of(const Letter& letter) const {
  return reinterpret_cast<const char*>(&letter) + kCacheLine;
}

bool Mailbox::pop() {
  Flow& flow = shared_->letters_flow;
  const auto* letter = reinterpret_cast<const Letter*>(shared_->ring + own(flow.read) % kRingBytes);
  return flow.advance(kCacheLine + (letter->inside ? round_up(letter->bytes, kCacheLine) : 0));
}

bool Mailbox::reply(const Reply& reply) {
  Flow& flow = shared_->replies_flow;
  if (!flow.has_room(1, kReplies)) return false;
  const uint64_t written = own(flow.written);
  shared_->replies[written % kReplies] = reply;
  publish(flow.written, written + 1);
  return true;
}

bool Mailbox::take(Reply* reply, bool* ring) {
  Flow& flow = shared_->replies_flow;
  const uint64_t read = own(flow.read);
  if (others(flow.written) == read) return false;
  *reply = shared_->replies[read % kReplies];
  *ring = flow.advance(1);
  return true;
}

char* Mailbox::free_slot() {
  const uint64_t written = own(shared_->slots_written);
  return written - others(shared_->slots_read) == kSlots ? nullptr
                                                         : shared_->slots[written % kSlots];
}

void Mailbox::filled_slot() { publish(shared_->slots_written, own(shared_->slots_written) + 1); }

const char* Mailbox::full_slot() {
  const uint64_t read = own(shared_->slots_read);
  return others(shared_->slots_written) == read ? nullptr : shared_->slots[read % kSlots];
}

void Mailbox::emptied_slot() { publish(shared_->slots_read, own(shared_->slots_read) + 1); }

}  // namespace dpt
