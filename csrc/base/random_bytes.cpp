#include "base/random_bytes.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.hpp"
#include "base/unique_fd.hpp"

namespace dpt {

void fill_random(void* bytes, size_t count) {
  if (getrandom(bytes, count, 0) == static_cast<ssize_t>(count)) return;
  const UniqueFd file(DPT_SYS_CHECK(open("/dev/urandom", O_RDONLY | O_CLOEXEC)));
  auto* place = static_cast<char*>(bytes);
  while (count > 0) {
    const ssize_t got = read(file.get(), place, count);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) throw_system_error("reading /dev/urandom");
    place += got;
    count -= static_cast<size_t>(got);
  }
}

}  // namespace dpt
