// Runs a group's operations one at a time, in the order they came. An operation runs in the
// caller's thread when nothing is ahead and the caller waits anyway, else on the group's progress
// thread.
//
// The thread starts with the first task that needs it and sleeps while there is none.
//
// NOTE [Completions] What an operation's end sets off may be a program's callback, which may start
// further operations of the group and wait for them. So it runs beside the operations that follow,
// for which there is another thread then. Completions run one after the other, in order: the ranks'
// callbacks start their operations in the same order then. Two do not wait for their turn: those of
// operations that a completion started, and any whose predecessor seems to wait for it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace dpt {

class Progress {
 public:
  using Task = std::function<void()>;

  ~Progress();  // runs what is queued, then stops the threads

  // Runs `task` here and now; false, and nothing done, when another operation is ahead.
  // Exceptions of the task pass through.
  bool try_run_inline(const Task& task);
  // Runs `operation` in its turn, and `completion` after it. Neither may throw.
  void enqueue(Task operation, Task completion = nullptr);
  // Waits until no operation is under way; false when `timeout` passed first.
  bool drain(std::chrono::milliseconds timeout);

 private:
  struct Entry {
    Task operation;
    Task completion;
    bool nested;  // started by a completion
  };
  using Lock = std::unique_lock<std::mutex>;

  // All with the lock held.
  void see_to_work();
  void run();
  void run_next(Lock& lock);
  void complete(Lock& lock);
  void run_completion(Lock& lock, const Task& completion);
  bool has_turn() const;

  std::mutex mutex_;
  std::condition_variable work_;     // for the threads
  std::condition_variable changed_;  // for who waits for the end of operations
  std::deque<Entry> queue_;
  std::deque<Task> completions_;
  bool busy_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  int available_ = 0;                            // threads that are not in a completion
  int completing_ = 0;                           // threads that go through completions_
  std::chrono::steady_clock::time_point since_;  // when one of them last began a completion
};

}  // namespace dpt
