#include "base/trusted_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.hpp"
#include "base/unique_fd.hpp"

namespace dpt {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(DPT_ERR_INVALID, path + " " + why);
}

void check(const std::string& path, const struct stat& status) {
  const std::string remedy = ": make it yours alone (copy it, chmod o-w), or name another file";
  if (!S_ISREG(status.st_mode)) refuse(path, "is no regular file");
  struct stat root{};
  const bool has_root = stat("/", &root) == 0;
  // Root could write our files anyway. The owner of "/" is root where that has no id of its own,
  // as in a container of one user.
  if (status.st_uid != geteuid() && status.st_uid != 0 &&
      !(has_root && status.st_uid == root.st_uid)) {
    refuse(path, "belongs to another user (id " + std::to_string(status.st_uid) + ")" + remedy);
  }
  if ((status.st_mode & S_IWOTH) != 0) refuse(path, "can be written by others" + remedy);
}

}  // namespace

std::optional<std::string> read_trusted(const std::string& path, off_t max_bytes) {
  // A pipe without a writer would hold up the open itself.
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
    throw_system_error("opening " + path);
  }
  struct stat status{};
  DPT_SYS_CHECK(fstat(file.get(), &status));
  check(path, status);
  if (status.st_size > max_bytes) {
    refuse(path,
           "has " + std::to_string(status.st_size) + " bytes, at most " +
               std::to_string(max_bytes) + " are read");
  }
  std::string text(static_cast<size_t>(status.st_size), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = read(file.get(), text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_system_error("reading " + path);
    if (count == 0) break;  // it has become shorter; the parser will say so
    done += static_cast<size_t>(count);
  }
  text.resize(done);
  return text;
}

}  // namespace dpt
