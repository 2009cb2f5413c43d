// One group's sends and receives: who carries them out, and who waits.
//
// NOTE [One driver] The state of all messages (comm/message_exchange.hpp) belongs to one thread at
// a time, the driver. That is a caller that submits or waits for a synchronous operation, or else
// the group's message thread. This thread starts with the first asynchronous operation that can't
// end at once, and sleeps while nothing is posted. New posts go through `inbox_`, so a submitter
// never waits for a driver that is copying. Collectives never wait for messages, nor the other way
// round.
//
// Thread safety: all functions from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/message_exchange.hpp"
#include "comm/statistics.hpp"

namespace dpt {

class PointToPoint {
 public:
  struct Host {
    Segment& segment;
    std::string group;
    std::shared_ptr<GroupStatistics> statistics;
    std::function<bool()> interrupted;  // may be empty
    // The group is broken: an abort, a timeout, an interrupt.
    std::function<void(const Error& reason)> fail;
    WaitStyle caller_style;
  };

  explicit PointToPoint(Host host);
  // Ends what is still unfinished with an error.
  ~PointToPoint();

  // A DPT_SEND or DPT_RECV with its number in the flight record; `done` is called only after
  // DPT_STARTED. Throws Error.
  dpt_outcome submit(const dpt_request& request,
                     uint64_t recorded,
                     dpt_done done,
                     void* done_context);
  // Waits until nothing is under way; false when `timeout` passed first.
  bool drain(std::chrono::milliseconds timeout);

 private:
  PostPtr make_post(const dpt_request& request);
  bool try_become_driver();
  void stop_driving();
  // The driver's: takes new posts, moves messages, tells of ends. True when something moved.
  bool step();
  // step(), then, when nothing moved, checks and a sleep of at most one slice.
  void drive(WaitStyle style);
  void check();
  void report();
  void wait(const PostPtr& post);
  void run();

  Host host_;
  MessageExchange exchange_;                                        // the driver's
  std::vector<std::pair<PostPtr, std::optional<Error>>> finished_;  // the driver's: to be reported
  AdaptiveSpin spin_;                                               // the driver's
  std::chrono::steady_clock::time_point next_check_{};              // the driver's

  std::mutex mutex_;                 // guards what follows, and how each post ended
  std::condition_variable changed_;  // a post ended, or there is no driver
  std::condition_variable turn_;     // for the message thread: work without a driver, or the end
  bool driving_ = false;
  bool stopping_ = false;
  uint64_t posts_ = 0;
  std::atomic<size_t> unfinished_{0};  // changed under the mutex
  std::vector<PostPtr> inbox_;
  std::thread thread_;
};

}  // namespace dpt
