// The operations of one rank of a staged group. `enqueue` enqueues at once what the rank's device
// is to do. Workers do what the processor is to do, bit by bit (`advance`).
//
// A reduced chunk goes this way:
//   1. the lane up waits until the slot is free, copies, and says `arrived`;
//   2. every worker waits until all ranks have, reduces its share of all ranks' slots in rank order
//      into the result's, and counts; the last of all says `ready`;
//   3. the lane down waits for that, copies, and says `taken`.
// Between nodes the last of the workers says `reduced` instead; then an internode sender passes the
// chunk on, and says `ready` (internode/internode_sender.hpp).
//
// A chunk that is passed on, or that devices reduce, goes from slots to them without workers.
// Workers only compare, once for each operation, which one the ranks are in (`checked`).
//
// Thread safety: `enqueue` by one thread at a time; `advance(w)` by worker w; the rest by any.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "staged/board.hpp"
#include "staged/copy_engine.hpp"
#include "staged/job.hpp"
#include "staged/start_hooks.hpp"

namespace dpt::staged {

class InternodeSender;
class Workers;

class Pipeline {
 public:
  // `workers` call `advance` once they know of this; at least as many as the shape has. `sender`:
  // between nodes.
  Pipeline(Board board,
           Membership ranks,
           Workers& workers,
           CopyEngine& engine,
           std::unique_ptr<InternodeSender> sender = nullptr);
  ~Pipeline();

  // Starts the operation behind what is on `stream`, which from here on waits for its end. `parts`:
  // one behind the other, of which the last one's end is the operation's.
  // `hooks.beside` puts its work there before anything of the operation is on a lane, on every rank
  // alike. So neither of the two waits for the other where a lane and `stream` share a queue.
  // Throws Error(DPT_ERR_ABORTED) when the group is broken; any other error breaks it.
  void enqueue(const std::vector<Job>& parts,
               std::chrono::milliseconds timeout,
               Stream stream,
               const StartHooks& hooks = {});

  enum class Progress { kIdle, kWaiting, kMoved };
  // Does what can be done without waiting: at most one chunk's share.
  Progress advance(int worker);

  struct Failure {
    enum Kind : uint32_t { kTimeout = 1, kMismatch, kAborted };
    Kind kind;
    int peer;           // rank in the group that was waited for, or differs
    uint32_t sequence;  // of the operation, from 1
  };
  // Why this rank's last operations have no results.
  std::optional<Failure> failure() const;
  // All that is under way ends, without results, and nothing can be started any more. `peer`: rank
  // in the group.
  void break_off(Failure::Kind kind, int peer);
  // Lets the streams go on that wait for operations without results.
  void release();
  bool is_broken() const { return board_.broken().load(std::memory_order_acquire) != 0; }
  // Whether all operations have ended with their results.
  bool is_done() const;
  // And nothing is on its way between nodes.
  bool is_quiet() const;
  // Every wait ends; see NOTE [Breaking]. Devices that are still under way undo it, so once more.
  void end_waits();

 private:
  using Clock = std::chrono::steady_clock;

  struct Op {
    Job job;
    uint64_t first = 0;        // chunk
    uint32_t number = 0;       // among the group's operations; parts of one have the same
    bool is_last = true;       // of its parts
    std::vector<size_t> rows;  // how many pieces one command copies up, from the first one on
    std::chrono::milliseconds timeout{0};
    std::atomic<Op*> next{nullptr};
    std::atomic<bool> begun{false};  // some rank's device came to it
    std::atomic<int> users{0};       // workers that have not gone on to the next
  };
  // The place that a worker has come to.
  struct alignas(kCacheLine) Cursor {
    Op* op = nullptr;
    bool is_over = true;  // nothing is left to do for it in `op`
    uint64_t chunk = 0;
    std::vector<double> factors;  // of all ranks' inputs
    std::vector<const void*> sources;
    std::optional<Clock::time_point> started;
    Clock::time_point waits_ended{};
  };

  Op& append(std::unique_ptr<Op> op);
  void put_on_lanes(const Op& op, Stream stream, const StartHooks& hooks);
  void close(const Op& op, Stream stream);
  void put_up(const Op& op, uint64_t chunk);
  std::vector<size_t> rows_of(const Job& job);
  void copy_up(const Op& op, uint64_t chunk, char* to);
  void put_down(const Op& op, uint64_t chunk);
  void wait_for_slot(uint64_t number, Job::Kind kind);

  bool has_begun(Op& op, int worker) const;
  bool all_came_to(Word& (Board::*word)(int, size_t) const, uint64_t number) const;
  bool start(Cursor& at, int worker);
  bool reduce_chunk(Cursor& at, int worker);
  bool check_alone(Cursor& at);
  bool carry(Cursor& at);
  void watch(Cursor& at);
  bool has_ended(const Op& op) const;
  Progress leave_broken(Cursor& at, int worker);
  int furthest_behind(Word& (Board::*word)(int, size_t) const, uint64_t number) const;
  int who_is_late(uint64_t number) const;
  // Whether a chunk of `depth` before was in the same slot.
  bool has_predecessor(uint64_t number) const {
    return number - board_.shape().first_chunk >= static_cast<uint64_t>(board_.shape().depth);
  }
  // That chunk's.
  uint64_t before(uint64_t number) const { return number - board_.shape().depth; }
  static int lane_of(uint64_t number) { return static_cast<int>(number % Lane::kCount); }
  size_t slot_of(uint64_t number) const { return number % board_.shape().depth; }

  const Board board_;
  const Membership ranks_;
  const int rank_;  // its place on the node, as of all ranks here
  Workers& workers_;
  CopyEngine& engine_;
  const std::unique_ptr<InternodeSender> sender_;

  // The thread that enqueues uses these.
  std::deque<std::unique_ptr<Op>> ops_;  // the last one, and those before that workers are in
  Job::Kind kinds_[Board::kMostDepth] = {};
  std::atomic<uint64_t> next_chunk_;
  std::atomic<uint32_t> last_number_{0};

  std::atomic<uint32_t> seen_to_the_end_{0};  // number of the last operation, by the first worker

  std::vector<Cursor> cursors_;
};

}  // namespace dpt::staged
