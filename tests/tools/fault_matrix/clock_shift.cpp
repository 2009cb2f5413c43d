// Preloaded into ranks of the fault matrix: lets one process's wall clock jump.
//
// The machine's own clock belongs to everybody, so what a process reads of it is shifted instead.
// Clocks that don't jump (CLOCK_MONOTONIC) are left alone, as the kernel leaves them.
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

#include <atomic>

namespace {

std::atomic<long> shift_s{0};

int real_clock_gettime(clockid_t clock, timespec* now) {
  using Function = int (*)(clockid_t, timespec*);
  static const auto function = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "clock_gettime"));
  return function(clock, now);
}

bool jumps(clockid_t clock) {
  return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

}  // namespace

extern "C" {

void shift_clock(long seconds) { shift_s = seconds; }

int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const int result = real_clock_gettime(clock, now);
  if (result == 0 && jumps(clock)) now->tv_sec += shift_s;
  return result;
}

int gettimeofday(timeval* __restrict now, void* __restrict) noexcept {
  timespec precise{};
  const int result = clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return result;
}

time_t time(time_t* result) noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  if (result != nullptr) *result = now.tv_sec;
  return now.tv_sec;
}
}
