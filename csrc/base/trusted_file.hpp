// Reads files of settings and measurements that nobody else can have written.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace dpt {

// The file's content; none where it is missing. The open file is looked at, not its name, as
// deepytorch_core/base/file_permissions.py:opened_data does: on one rank both must come to the
// same.
//
// Throws Error naming `path` for what is no regular file or is longer than `max_bytes`. Throws it
// also for a file that belongs to another user than this one and root, or that others can write to.
// Failing system calls throw it as well.
std::optional<std::string> read_trusted(const std::string& path, off_t max_bytes);

}  // namespace dpt
