#include "comm/progress.hpp"

#include "base/thread.hpp"

namespace dpt {

Progress::~Progress() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Progress::try_run_inline(const Task& task) {
  {
    std::lock_guard lock(mutex_);
    if (busy_ || !queue_.empty()) return false;
    busy_ = true;
  }
  struct Release {
    Progress& progress;
    ~Release() {
      {
        std::lock_guard lock(progress.mutex_);
        progress.busy_ = false;
      }
      // Without a thread nobody but drain() waits, and drain() polls.
      if (progress.thread_.joinable()) progress.changed_.notify_all();
    }
  } release{*this};
  task();
  return true;
}

void Progress::enqueue(Task task) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(task));
  if (!thread_.joinable()) thread_ = start_thread([this] { run(); });
  changed_.notify_all();
}

bool Progress::drain(std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  std::unique_lock lock(mutex_);
  while (busy_ || !queue_.empty()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    changed_.wait_for(lock, std::chrono::milliseconds(10));
  }
  return true;
}

void Progress::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !busy_ && (stopping_ || !queue_.empty()); });
    if (queue_.empty()) return;
    const Task task = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    task();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace dpt
