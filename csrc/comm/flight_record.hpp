// Records what this process did last in each of its groups, in memory that another process can read
// while this one is stuck or stopped.
//
// One memfd per process, named "deepytorch-flight": whoever may look into /proc/<pid>/fd finds and
// reads it. The reader, deepytorch_core/hang/record.py, knows this layout by heart: change both,
// and the version. The memfd's size is sealed. It holds a header, a table of groups, the peers of
// this node and a ring of the newest operations. It also has a table of the program's lines that
// were found to call operations.
//
// Lifecycle: made by the process's first group, never destroyed. A child made by fork has no part
// in it. Thread safety: all functions from any thread; `begin` and `end` take no lock, call no
// system, allocate nothing. A thread that sleeps inside `begin` while others begin a whole ring of
// operations spoils one entry.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/types.hpp"

namespace dpt {

class FlightRecord {
 public:
  static constexpr uint32_t kVersion = 3;
  static constexpr size_t kEntries = 2048;
  static constexpr size_t kGroups = 256;
  static constexpr size_t kPeers = 256;
  static constexpr size_t kPlaces = 256;
  static constexpr size_t kListedRanks = 120;

  enum State : uint8_t { kEntered = 1, kEnded = 2, kFailed = 3, kIssued = 4 };
  // Names who carries it out; not known before the ranks have met.
  enum How : uint8_t { kUndecided = 0, kNative = 1, kDelegated = 2 };

  static FlightRecord& instance();
  // In a forked child: the record is its parent's.
  static void close_after_fork();

  // Identifies this process. `job` is the same text on all ranks; `signal` makes it write its
  // Python stacks (0: none).
  struct Identity {
    std::string job;
    int64_t global_rank;
    int64_t world_size;
    int32_t signal;
  };
  void identify(const Identity& identity);
  // Ranks of this node, as far as groups have met.
  void note_peer(int64_t global_rank, int64_t pid);

  // A group's id; -1 when the table is full, and then its operations are not recorded.
  int open_group(const std::string& name, const std::vector<int64_t>& global_ranks);
  void close_group(int group);
  // Records what people call the group of this name.
  void describe_group(const std::string& name, const std::string& description);

  // A call of this process. Returns the operation's number, for what follows; 0: not recorded.
  uint64_t begin(int group, const dpt_request& request, How how = kUndecided);
  void note(uint64_t number, How how);
  // Only the first end counts. `at`: where the clock has been read already, which is a third of
  // what a record costs; on Linux this one is the monotonic clock.
  using Time = std::chrono::steady_clock::time_point;
  void end(uint64_t number, State state, std::optional<Time> at = std::nullopt);

  // The line that called it, where it was not in the request. No lock either.
  void note_place(uint64_t number, const dpt_place& place);
  // From here on the caller waits for it, or is told of its end.
  void note_wait(uint64_t number);

  // For how long this process has been in an operation that others keep waiting, in ns; 0: in none.
  // Messages and operations of the delegate don't count when nobody waits for them. They may have
  // been posted long before they are due, and may have ended unnoticed. The host does not see the
  // end of operations on devices: of these only the one that this process began last counts.
  int64_t longest_wait_ns() const;

  // Operations that begin meanwhile are not recorded: to measure what recording costs.
  void pause(bool paused) { paused_ = paused; }

  // The memfd; -1: the system gave none, and nothing is recorded.
  int fd() const { return fd_; }

  struct Header {
    char magic[8];  // "dptfly01"
    uint32_t version;
    uint32_t header_bytes, group_bytes, peer_bytes, place_bytes, entry_bytes;
    uint32_t groups, peers, places, entries;
    int64_t pid;
    int64_t global_rank, world_size;
    int32_t signal;
    int32_t reserved;
    int64_t started_realtime_ns, started_monotonic_ns;  // the same moment on two clocks
    char host[64];
    char boot_id[40];
    char job[40];
    std::atomic<uint64_t> next;  // operations begun so far
  };
  struct Group {
    std::atomic<uint32_t> open;
    int32_t size;
    int64_t first_rank, stride;  // global ranks, when they lie so; else stride is 0 and
    int32_t listed;              // the first `listed` of them are in `ranks`
    std::atomic<int32_t> id;  // its place in the table, plus kGroups for each one before it there
    char name[96];
    char description[96];
    std::atomic<uint64_t> collectives, messages;  // begun so far
    int32_t ranks[kListedRanks];
  };
  struct Peer {
    std::atomic<int64_t> global_rank;  // plus one; 0: none
    std::atomic<int64_t> pid;
  };
  // Once written it stays as it is; what comes when all are taken is not kept.
  struct Place {
    enum State : uint32_t { kFree = 0, kBeingWritten = 1, kWritten = 2 };
    std::atomic<uint32_t> state;
    int32_t line;
    char function[56];
    char file[192];  // of a longer name the end
  };
  struct alignas(128) Entry {
    std::atomic<uint64_t> number;  // from 1; 0 while it is being written
    uint64_t sequence;             // within the group: of collectives, or of messages
    int64_t entered_ns;            // on the monotonic clock, as what follows
    std::atomic<int64_t> ended_ns;
    uint64_t count;  // elements of one buffer
    uint64_t bytes;
    int32_t root;  // rank in the group
    int32_t tag;
    int32_t group;  // the group's id
    uint8_t collective, dtype, reduce_op;
    std::atomic<uint8_t> flags;  // 1: uneven parts, 2: on a device, 4: the caller does not wait
    std::atomic<uint8_t> state, how;
    std::atomic<uint16_t> place;  // in the table of places, from 1; 0: not sampled
    int64_t timeout_ms;           // the operation's time limit; 0: not known
  };

 private:
  FlightRecord();
  Group* group_of(int group) const;
  Entry* entry_of(uint64_t number) const;
  uint16_t index_of(const dpt_place& place);

  std::mutex mutex_;  // guards the tables' changes
  std::atomic<bool> paused_{false};
  int fd_ = -1;
  char* memory_ = nullptr;
  Header* header_ = nullptr;
  Group* groups_ = nullptr;
  Peer* peers_ = nullptr;
  Place* places_ = nullptr;
  Entry* entries_ = nullptr;
};

}  // namespace dpt
