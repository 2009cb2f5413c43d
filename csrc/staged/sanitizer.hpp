// For tests in which ranks are threads. Each rank sees the board at an address of its own. So the
// thread sanitizer can't tell that the board's words order the ranks (segment.cpp, NOTE [Thread
// sanitizer]). Workers say when they are done with memory; a test's device may take that up.
#pragma once

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace dpt::staged {

#if defined(__SANITIZE_THREAD__)
inline char sanitizer_token;
inline void tell_sanitizer_of_write() { __tsan_release(&sanitizer_token); }
inline void tell_sanitizer_of_wait() { __tsan_acquire(&sanitizer_token); }
#else
inline void tell_sanitizer_of_write() {}
inline void tell_sanitizer_of_wait() {}
#endif

}  // namespace dpt::staged
