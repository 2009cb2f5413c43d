// A device's part in a group that is staged through the host's memory. It copies up and down,
// each direction on lanes of its own, and adds up. It waits for words of that memory and writes
// them, in the order of the lane.
//
// Everything is enqueued and nothing here waits for the device. So once a call returned, the
// operation needs nothing more of this process than the workers' threads (workers.hpp). These never
// call the device, so its driver can't hold them up, whatever else it is busy with.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/types.hpp"

namespace dpt::staged {

// A stream of the device, as its driver names it.
using Stream = void*;
// In memory that ranks and devices share.
using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == sizeof(uint32_t) && Word::is_always_lock_free);

// The word that stands for a number.
constexpr uint32_t low(uint64_t number) { return static_cast<uint32_t>(number); }

// Whether a word that only grows has come to `value`, however often it went round.
constexpr bool has_come_to(uint32_t word, uint32_t value) {
  return static_cast<int32_t>(word - value) >= 0;
}

// Each direction has some lanes, which are not ordered among each other: while one tells that it
// has copied the next one copies.
struct Lane {
  enum Direction { kUp, kDown };    // from the device to the host, and back
  static constexpr int kCount = 2;  // of a direction

  Direction direction;
  int index;
};

// Equal rows of memory, apart by a pitch on either side.
struct Rows {
  size_t count;
  size_t bytes;  // of one
  size_t host_pitch;
  size_t device_pitch;
};

// All ranks' input for one output: this rank's where the caller has it, the others' in rank order
// in a lane's buffer.
struct Pieces {
  DataType dtype;
  ReduceOp op;
  int rank;
  int ranks;
  const char* own;
  const char* others;
  size_t pitch;  // of the others
  char* to;      // may be `own`
  size_t bytes;  // of each
};

// One group's lanes on one device. Errors are Error(DPT_ERR_SYSTEM). Used by one thread at a time.
class CopyEngine {
 public:
  virtual ~CopyEngine() = default;

  // The group's memory, for copies and words, and how much each lane down needs on the device;
  // once, before anything else. Both are let go by the destructor, at the latest, which waits for
  // the lanes.
  virtual void map(char* memory, size_t bytes, size_t buffer_bytes) = 0;
  // While what this gives lives, the calling thread may enqueue.
  virtual std::shared_ptr<void> enter() = 0;

  // All lanes wait for what is on `stream`.
  virtual void fork(Stream stream) = 0;
  // The first lane down waits for all the others.
  virtual void meet() = 0;
  // `stream` waits for the first lane down.
  virtual void join(Stream stream) = 0;

  // Whether one command may copy several rows of this memory of the device. Within enter().
  virtual bool is_one(const char* memory, size_t bytes) = 0;
  // On a lane of that direction; up, several rows only of what is_one.
  virtual void copy_up(int index, char* host, const char* device, const Rows& rows) = 0;
  virtual void copy_down(int index, char* device, const char* host, const Rows& rows) = 0;
  // That lane's memory on the device, of whole cache lines.
  virtual char* buffer(int index) = 0;
  // On a lane down. Of what Job::adds_on_device says.
  virtual void reduce(int index, const Pieces& pieces) = 0;
  // On the first lane down.
  virtual void copy_local(char* to, const char* from, size_t bytes) = 0;

  // The lane waits until has_come_to(word, value).
  virtual void wait(Lane lane, const Word& word, uint32_t value) = 0;
  // The lane waits until the word has one of these bits.
  virtual void wait_for_bits(Lane lane, const Word& word, uint32_t bits) = 0;
  // A reader of this also sees what was written before.
  virtual void write(Lane lane, Word& word, uint32_t value) = 0;

  // Words may be kept back until the lane copies, meets, or this is called.
  virtual void submit(Lane lane) = 0;

  // Whether everything that was enqueued has ended; also where the device is broken.
  virtual bool is_idle() = 0;
};

}  // namespace dpt::staged
