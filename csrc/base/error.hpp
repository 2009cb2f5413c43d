// One error vocabulary: the C ABI's status codes and one exception that carries them.
//
// Inside the core a failure is an `Error`; the C ABI turns it into a status plus a message
// (comm/c_api.cpp), and the adapter turns that into the exception torch users know.
#pragma once

#include <stdexcept>
#include <string>

#include "deepytorch.h"

namespace dpt {

class Error : public std::runtime_error {
 public:
  Error(dpt_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  dpt_status status() const { return status_; }

 private:
  dpt_status status_;
};

// Errors say this of a rank that ended its membership itself: "rank 1" + kHasLeft.
inline constexpr char kHasLeft[] =
    " has left the group (destroy_process_group, or its program's end)";

// Error(DPT_ERR_SYSTEM) for a failed system call: "<what>: <strerror> (errno N)".
[[noreturn]] void throw_system_error(const std::string& what);

// Fits `text` into a C ABI message.
void set_message(dpt_error* error, const char* text);

}  // namespace dpt

// A broken invariant of the core itself, never a user's mistake.
#define DPT_CHECK(condition)                                                                     \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      throw ::dpt::Error(DPT_ERR_INTERNAL,                                                       \
                         std::string("internal check failed: " #condition " at " __FILE__ ":") + \
                             std::to_string(__LINE__));                                          \
    }                                                                                            \
  } while (0)

// A system call that returns -1 on failure; the message names the call.
#define DPT_SYS_CHECK(call)                                 \
  [&] {                                                     \
    auto dpt_result = (call);                               \
    if (dpt_result == -1) ::dpt::throw_system_error(#call); \
    return dpt_result;                                      \
  }()
