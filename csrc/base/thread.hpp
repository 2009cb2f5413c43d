// Threads of the core's own.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace dpt {

// Whether start_thread made the current thread: nobody but the core has state there.
inline thread_local bool is_own_thread = false;

// A thread that takes no signals: they belong to the application's threads, and Python runs its
// handlers in the main one.
template <typename Function>
std::thread start_thread(Function&& function) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread([run = std::forward<Function>(function)]() mutable {
    is_own_thread = true;
    run();
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace dpt
