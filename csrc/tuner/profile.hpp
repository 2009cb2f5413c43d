// The profile: measured times kept between runs, as a JSON file that people can read.
//
// Tables are its list "groups"; the list "decisions" is the Python side's and stays as it is.
// It holds tables of several machines, versions and group shapes, so a home folder may be shared.
// Writers replace the whole file by a rename and keep what others put there; of two that write in
// the same instant the later wins, and the other's times are measured again some day.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tuner/table.hpp"

namespace dpt {

// Raised when a table of an earlier format would be misread.
constexpr int kProfileFormat = 1;

struct ProfileKey {
  std::string machine;  // what times depend on: see describe_machine, or the group's device
  std::string version;  // deepytorch's
  TuningClass group;
};

// The table that the profile's text holds for `key`, or nothing. Throws Error(DPT_ERR_INVALID) that
// names the wrong field.
std::optional<TimingTable> find_in_profile(const std::string& text, const ProfileKey& key);

// All tables of operations on devices, whatever the device, that this version wrote. Throws as
// find_in_profile.
struct DeviceTable {
  std::string device;
  int ranks;
  TimingTable times;
};
std::vector<DeviceTable> device_tables(const std::string& text, const std::string& version);

// The profile's text with the times of `table` put in. `text` may be empty: a new profile. Throws
// as find_in_profile.
std::string merge_into_profile(const std::string& text,
                               const ProfileKey& key,
                               const TimingTable& table);

// The content of the file at `path`; empty when there is none. Error(DPT_ERR_SYSTEM) when it can't
// be read, Error(DPT_ERR_INVALID) when somebody else could have written it.
std::string read_profile(const std::string& path);
// Replaces the file in one step; makes its folder. Error(DPT_ERR_SYSTEM).
void write_profile(const std::string& path, const std::string& text);

}  // namespace dpt
