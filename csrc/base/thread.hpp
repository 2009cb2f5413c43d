// Threads of the core's own.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace dpt {

// A thread that takes no signals: they belong to the application's threads, and Python runs its
// handlers in the main one.
template <typename Function>
std::thread start_thread(Function&& function) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::forward<Function>(function));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace dpt
