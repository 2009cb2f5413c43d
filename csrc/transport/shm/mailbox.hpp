// Messages from one rank to another of its node: one ordered pair's part of the group's segment.
//
//   letters   sender -> receiver: a ring of announcements in posting order; a small message lies in
//             it whole, right behind its letter
//   replies   receiver -> sender: a ring of answers, one per announced (large) message
//   slots     the content of the one large message that the receiver granted, in pieces
//
// Each of the three has one writer and one reader and never blocks: a function says that there is
// no room, or nothing new. A rank waits on its doorbell (Segment::await_ring).
//
// NOTE [Room] Each of the three is small, and no number of messages may stall in it. Writers keep
// on their heap what finds no room, and neither side stops reading because it can't write. A
// receiver reads letters as long as it looks for a match; a sender reads replies as long as one is
// missing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dpt {

constexpr uint64_t kNowhere = ~uint64_t{0};

struct Letter {
  uint64_t number = 0;  // of this pair's letters, from 1
  uint64_t count = 0;
  uint64_t bytes = 0;
  // The content's offset in the sender's registered memory, or kNowhere.
  uint64_t offset = kNowhere;
  int32_t tag = 0;
  int32_t dtype = 0;
  uint32_t inside = 0;  // 1: the content follows
  uint32_t filler = 0;  // 1: no message, only the rest of the ring before it starts over
};

struct Reply {
  enum Kind : uint32_t {
    kGranted,  // send it: to `offset` of the receiver's registered memory, or through the slots
    kTaken,    // the receiver has copied it from the sender's registered memory
    kRefused,  // the receiver expected what `count` and `dtype` say; its operation has failed
  };
  uint64_t number;
  uint64_t offset;
  uint64_t count;
  Kind kind;
  int32_t dtype;
};

class Mailbox {
 public:
  static constexpr size_t kSlotBytes = 128 << 10;
  // Larger messages are announced, and sent when the receiver is ready for them.
  static constexpr size_t kMostInside = 64 << 10;

  // For all pairs of a group. Pages that no message touched cost no memory.
  static size_t area_bytes(int size);

  Mailbox() = default;
  // `area` as area_bytes says, of a group of `size`.
  Mailbox(char* area, int from, int to, int size);

  // The sender's side. False: no room now, and the receiver will ring when it made some.
  bool post(const Letter& letter, const void* content);
  // False: no reply. `*ring`: the receiver waits for room and must be rung.
  bool take(Reply* reply, bool* ring);
  char* free_slot();  // nullptr: all are full
  void filled_slot();

  // The receiver's side. nullptr: no letter. The content lies behind the letter.
  const Letter* front();
  const char* content_of(const Letter& letter) const;
  // Done with the front letter; true when the sender waits for room and must be rung.
  bool pop();
  // False: no room now, and the sender will ring when it made some.
  bool reply(const Reply& reply);
  const char* full_slot();  // nullptr: none is
  void emptied_slot();

 private:
  struct Shared;
  Shared* shared_ = nullptr;
};

}  // namespace dpt
