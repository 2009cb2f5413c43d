#include "transport/shm/mailbox.hpp"

#include <atomic>
#include <cstring>

#include "base/error.hpp"
#include "base/types.hpp"

namespace dpt {
namespace {

constexpr size_t kRingBytes = 256 << 10;
constexpr size_t kReplies = 4 * Mailbox::kMostAnnounced;
constexpr size_t kSlots = 4;
constexpr size_t kPage = 4096;

// Counts since the group's beginning; they never wrap.
struct alignas(kCacheLine) Counter {
  std::atomic<uint64_t> value;
};

uint64_t own(const Counter& counter) { return counter.value.load(std::memory_order_relaxed); }
uint64_t others(const Counter& counter) { return counter.value.load(std::memory_order_acquire); }
void publish(Counter& counter, uint64_t value) {
  counter.value.store(value, std::memory_order_release);
}

static_assert(sizeof(Letter) <= kCacheLine);

}  // namespace

struct Mailbox::Shared {
  Counter letters_written;  // in bytes of the ring
  Counter letters_read;
  alignas(kCacheLine) std::atomic<uint32_t> wants_room;
  Counter replies_written;
  Counter replies_read;
  Counter slots_written;
  Counter slots_read;
  alignas(kCacheLine) Reply replies[kReplies];
  alignas(kPage) char ring[kRingBytes];
  alignas(kPage) char slots[kSlots][kSlotBytes];
};

size_t Mailbox::area_bytes(int size) {
  return sizeof(Shared) * static_cast<size_t>(size) * static_cast<size_t>(size);
}

Mailbox::Mailbox(char* area, int from, int to, int size)
    : shared_(reinterpret_cast<Shared*>(area) + static_cast<size_t>(from) * size + to) {}

bool Mailbox::post(const Letter& letter, const void* content) {
  const size_t needed = kCacheLine + (letter.inside ? round_up(letter.bytes, kCacheLine) : 0);
  uint64_t written = own(shared_->letters_written);
  const size_t to_end = kRingBytes - written % kRingBytes;
  // A letter and its content lie in one piece; what is left before the end is skipped.
  const size_t skipped = to_end < needed ? to_end : 0;
  auto has_room = [&] {
    const uint64_t read = shared_->letters_read.value.load(std::memory_order_seq_cst);
    return written + skipped + needed - read <= kRingBytes;
  };
  if (!has_room()) {
    // Pairs with pop(): either it sees the wish, or we see the room it made.
    shared_->wants_room.store(1, std::memory_order_seq_cst);
    if (!has_room()) return false;
  }
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
  publish(shared_->letters_written, written + needed);
  return true;
}

const Letter* Mailbox::front() {
  for (;;) {
    const uint64_t read = own(shared_->letters_read);
    if (others(shared_->letters_written) == read) return nullptr;
    const auto* letter = reinterpret_cast<const Letter*>(shared_->ring + read % kRingBytes);
    if (!letter->filler) return letter;
    // What follows was published together with the filler.
    publish(shared_->letters_read, read + kRingBytes - read % kRingBytes);
  }
}

const char* Mailbox::content_of(const Letter& letter) const {
  return reinterpret_cast<const char*>(&letter) + kCacheLine;
}

bool Mailbox::pop() {
  const uint64_t read = own(shared_->letters_read);
  const auto* letter = reinterpret_cast<const Letter*>(shared_->ring + read % kRingBytes);
  const size_t bytes = kCacheLine + (letter->inside ? round_up(letter->bytes, kCacheLine) : 0);
  shared_->letters_read.value.store(read + bytes, std::memory_order_seq_cst);
  return shared_->wants_room.load(std::memory_order_seq_cst) != 0 &&
         shared_->wants_room.exchange(0, std::memory_order_seq_cst) != 0;
}

void Mailbox::reply(const Reply& reply, bool droppable) {
  const uint64_t written = own(shared_->replies_written);
  const size_t unread = written - others(shared_->replies_read);
  if (droppable && unread >= kReplies - kMostAnnounced) return;
  DPT_CHECK(unread < kReplies);
  shared_->replies[written % kReplies] = reply;
  publish(shared_->replies_written, written + 1);
}

bool Mailbox::take(Reply* reply) {
  const uint64_t read = own(shared_->replies_read);
  if (others(shared_->replies_written) == read) return false;
  *reply = shared_->replies[read % kReplies];
  publish(shared_->replies_read, read + 1);
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
