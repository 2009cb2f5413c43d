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
// Throws Error naming `path` for what is no regular file, is longer than `max_bytes`, belongs to
// another user than this one and root, or can be written by others; and for failing system calls.
std::optional<std::string> read_trusted(const std::string& path, off_t max_bytes);

}  // namespace dpt
