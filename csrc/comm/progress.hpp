// Runs a group's operations one at a time, in the order they came: in the caller's thread when
// nothing is ahead and the caller waits anyway, else on the group's progress thread.
//
// The thread starts with the first task that needs it and sleeps while there is none.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace dpt {

class Progress {
 public:
  using Task = std::function<void()>;

  ~Progress();  // runs what is queued, then stops the thread

  // Runs `task` here and now; false, and nothing done, when another operation is ahead.
  // Exceptions of the task pass through.
  bool try_run_inline(const Task& task);
  // `task` must not throw.
  void enqueue(Task task);
  // Waits until nothing is under way; false when `timeout` passed first.
  bool drain(std::chrono::milliseconds timeout);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace dpt
