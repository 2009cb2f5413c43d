#include "comm/progress.hpp"

#include "base/thread.hpp"

namespace dpt {
namespace {

// A completion that takes longer seems to wait for a later one.
constexpr std::chrono::milliseconds kPatience{50};

thread_local const Progress* completing_of = nullptr;

}  // namespace

Progress::~Progress() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (;;) {
    std::vector<std::thread> ending;
    {
      std::lock_guard lock(mutex_);
      ending.swap(threads_);  // a completion may still need another one
    }
    if (ending.empty()) return;
    for (std::thread& each : ending) each.join();
  }
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
      std::lock_guard lock(progress.mutex_);
      progress.busy_ = false;
      progress.see_to_work();
      // Without a thread nobody but drain() waits, and drain() polls.
      if (!progress.threads_.empty()) progress.changed_.notify_all();
    }
  } release{*this};
  task();
  return true;
}

void Progress::enqueue(Task operation, Task completion) {
  std::lock_guard lock(mutex_);
  queue_.push_back({std::move(operation), std::move(completion), completing_of == this});
  see_to_work();
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

// There is a thread for what is to be done, now or when the operation under way is over.
void Progress::see_to_work() {
  if (queue_.empty() && completions_.empty()) return;
  if (available_ == 0) {
    threads_.push_back(start_thread([this] { run(); }));
    ++available_;
  }
  work_.notify_one();
}

void Progress::run() {
  Lock lock(mutex_);
  for (;;) {
    const bool can_run = !busy_ && !queue_.empty();
    if (!completions_.empty() && (completing_ == 0 || (!can_run && has_turn()))) {
      complete(lock);
    } else if (can_run) {
      run_next(lock);
    } else if (stopping_ && queue_.empty() && completions_.empty()) {
      work_.notify_all();
      return;
    } else if (completions_.empty()) {
      work_.wait(lock);
    } else {
      work_.wait_for(lock, kPatience);
    }
  }
}

void Progress::run_next(Lock& lock) {
  Entry entry = std::move(queue_.front());
  queue_.pop_front();
  busy_ = true;
  lock.unlock();
  entry.operation();
  entry.operation = nullptr;
  lock.lock();
  busy_ = false;
  changed_.notify_all();
  if (!entry.completion) return;
  if (!entry.nested) {
    completions_.push_back(std::move(entry.completion));
    return;
  }
  --available_;
  run_completion(lock, entry.completion);
  ++available_;
}

bool Progress::has_turn() const { return std::chrono::steady_clock::now() - since_ >= kPatience; }

void Progress::complete(Lock& lock) {
  --available_;
  ++completing_;
  while (!completions_.empty()) {
    const Task completion = std::move(completions_.front());
    completions_.pop_front();
    since_ = std::chrono::steady_clock::now();
    run_completion(lock, completion);
  }
  --completing_;
  ++available_;
}

void Progress::run_completion(Lock& lock, const Task& completion) {
  see_to_work();
  lock.unlock();
  completing_of = this;
  completion();
  completing_of = nullptr;
  lock.lock();
}

}  // namespace dpt
