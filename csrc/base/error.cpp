#include "base/error.hpp"

#include <cerrno>
#include <cstring>

namespace dpt {

void throw_system_error(const std::string& what) {
  const int code = errno;
  throw Error(DPT_ERR_SYSTEM,
              what + ": " + std::strerror(code) + " (errno " + std::to_string(code) + ")");
}

void set_message(dpt_error* error, const char* text) {
  std::strncpy(error->message, text, sizeof error->message - 1);
  error->message[sizeof error->message - 1] = '\0';
}

}  // namespace dpt
