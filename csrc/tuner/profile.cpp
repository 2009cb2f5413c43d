#include "tuner/profile.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/trusted_file.hpp"

namespace dpt {
namespace {

using json::Array;
using json::Object;
using json::Value;

constexpr off_t kMaxProfileBytes = 256 << 20;

[[noreturn]] void fail(const std::string& what) { throw Error(DPT_ERR_INVALID, what); }

// `path` is where in the file `object` is, for messages.
const Value& field(const Value& object, const char* name, const std::string& path) {
  const auto* fields = object.get_if<Object>();
  if (fields == nullptr) fail(path + " is " + object.kind() + ", not an object");
  for (const auto& [key, value] : *fields) {
    if (key == name) return value;
  }
  fail(path + " lacks \"" + name + "\"");
}

template <typename T>
const T& get(const Value& object, const char* name, const std::string& path) {
  const Value& value = field(object, name, path);
  const T* typed = value.get_if<T>();
  if (typed == nullptr) fail(path + "." + name + " is " + value.kind());
  return *typed;
}

bool has(const Value& object, const char* name) {
  const auto* fields = object.get_if<Object>();
  return fields != nullptr && std::any_of(fields->begin(), fields->end(), [&](const auto& each) {
           return each.key == name;
         });
}

double to_number(const Value& value, const std::string& path) {
  if (const auto* integer = value.get_if<int64_t>()) return static_cast<double>(*integer);
  const auto* number = value.get_if<json::Number>();
  if (number == nullptr) fail(path + " is " + value.kind() + ", not a number");
  return std::strtod(number->digits.c_str(), nullptr);
}

Value to_value(double number) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.2f", number);
  return {json::Number{digits}};
}

// An integer from 0 on that older profiles lack.
int get_count(const Value& object, const char* name, const std::string& path) {
  if (!has(object, name)) return 0;
  const int64_t count = get<int64_t>(object, name, path);
  if (count < 0 || count > std::numeric_limits<int>::max()) {
    fail(path + "." + name + " is " + std::to_string(count));
  }
  return static_cast<int>(count);
}

std::string at(const std::string& path, const char* name, size_t index) {
  return path + "." + name + "[" + std::to_string(index) + "]";
}

std::optional<Collective> collective_of(const std::string& name) {
  for (int index = 0; index < kNumCollectives; ++index) {
    const auto collective = static_cast<Collective>(index);
    if (name == name_of(collective)) return collective;
  }
  return std::nullopt;
}

std::optional<int> bucket_at(int64_t nominal) {
  for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
    if (range_of(bucket).nominal == static_cast<size_t>(nominal)) return bucket;
  }
  return std::nullopt;
}

Measurement parse_time(const Value& time, bool on_device, const std::string& path) {
  const auto& name = get<std::string>(time, "algorithm", path);
  const auto algorithm = known_algorithm(name, on_device);
  if (!algorithm) fail(path + ".algorithm: there is no algorithm " + name);
  const int64_t chunk = get<int64_t>(time, "chunk_bytes", path);
  if (chunk < 0 || chunk % kCacheLine != 0) {
    fail(path + ".chunk_bytes is " + std::to_string(chunk) + ", not a multiple of " +
         std::to_string(kCacheLine));
  }
  const int delegated = get_count(time, "delegated", path);
  if (delegated >= 100) {
    fail(path + ".delegated is " + std::to_string(delegated) + ", not a part in percent");
  }
  const auto& spread = get<Array>(time, "spread_us", path);
  if (spread.size() != 2) fail(path + ".spread_us needs two numbers");
  const double median = to_number(field(time, "median_us", path), path + ".median_us");
  return {{*algorithm,
           static_cast<size_t>(chunk),
           get_count(time, "channels", path),
           get_count(time, "threads", path),
           delegated},
          median,
          to_number(spread[0], path + ".spread_us[0]"),
          to_number(spread[1], path + ".spread_us[1]")};
}

Entry parse_times(const Value& row, bool on_device, const std::string& path) {
  Entry entry;
  const auto& times = get<Array>(row, "times", path);
  for (size_t i = 0; i < times.size(); ++i) {
    entry.push_back(parse_time(times[i], on_device, at(path, "times", i)));
  }
  return entry;
}

bool is_on_device(const Value& group, const std::string& path) {
  return has(group, "on_device") && get<bool>(group, "on_device", path);
}

TimingTable parse_table(const Value& group, const std::string& path) {
  TimingTable table;
  const bool on_device = is_on_device(group, path);
  const auto& rows = get<Array>(group, "measured", path);
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::string where = at(path, "measured", i);
    const auto collective = collective_of(get<std::string>(rows[i], "collective", where));
    if (!collective) fail(where + ".collective is no collective");
    const auto bucket = bucket_at(get<int64_t>(rows[i], "bytes", where));
    if (!bucket) fail(where + ".bytes is no size that is measured");
    table.at(*collective, *bucket) = parse_times(rows[i], on_device, where);
  }
  return table;
}

Array dump_table(const TimingTable& table) {
  Array rows;
  for (int index = 0; index < kNumCollectives; ++index) {
    const auto collective = static_cast<Collective>(index);
    for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
      const Entry& entry = table.at(collective, bucket);
      if (entry.empty()) continue;
      Array times;
      for (const Measurement& measurement : entry) {
        const Candidate& candidate = measurement.candidate;
        Object time = {{"algorithm", {std::string(name_of(candidate.algorithm))}},
                       {"chunk_bytes", {static_cast<int64_t>(candidate.chunk_bytes)}}};
        if (candidate.channels != 0) {
          time.push_back({"channels", {static_cast<int64_t>(candidate.channels)}});
          time.push_back({"threads", {static_cast<int64_t>(candidate.threads)}});
        }
        if (candidate.delegated != 0) {
          time.push_back({"delegated", {static_cast<int64_t>(candidate.delegated)}});
        }
        time.push_back({"median_us", to_value(measurement.median_us)});
        time.push_back(
            {"spread_us", {Array{to_value(measurement.low_us), to_value(measurement.high_us)}}});
        times.push_back({std::move(time)});
      }
      rows.push_back({Object{{"collective", {std::string(name_of(collective))}},
                             {"bytes", {static_cast<int64_t>(range_of(bucket).nominal)}},
                             {"times", {std::move(times)}}}});
    }
  }
  return rows;
}

bool describes(const Value& group, const ProfileKey& key, const std::string& path) {
  return is_on_device(group, path) == key.group.on_device() &&
         get<std::string>(group, "machine", path) == key.machine &&
         get<std::string>(group, "deepytorch", path) == key.version &&
         get<int64_t>(group, "ranks", path) == key.group.ranks &&
         get<bool>(group, "oversubscribed", path) == key.group.oversubscribed;
}

// The groups of a profile; empty for one of another format, which is measured anew.
Array parse_groups(const std::string& text) {
  if (text.empty()) return {};
  const Value document = json::parse(text);
  if (get<int64_t>(document, "format", "the profile") != kProfileFormat) return {};
  return get<Array>(document, "groups", "the profile");
}

// Fields that the Python side keeps in the same file; nothing of another format.
Object other_fields(const std::string& text) {
  if (text.empty()) return {};
  const Value document = json::parse(text);
  if (get<int64_t>(document, "format", "the profile") != kProfileFormat) return {};
  Object fields = *document.get_if<Object>();
  std::erase_if(fields,
                [](const auto& field) { return field.key == "format" || field.key == "groups"; });
  return fields;
}

}  // namespace

std::optional<TimingTable> find_in_profile(const std::string& text, const ProfileKey& key) {
  const Array groups = parse_groups(text);
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string path = "groups[" + std::to_string(i) + "]";
    if (describes(groups[i], key, path)) return parse_table(groups[i], path);
  }
  return std::nullopt;
}

std::vector<DeviceTable> device_tables(const std::string& text, const std::string& version) {
  std::vector<DeviceTable> tables;
  const Array groups = parse_groups(text);
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string path = "groups[" + std::to_string(i) + "]";
    if (!is_on_device(groups[i], path)) continue;
    if (get<std::string>(groups[i], "deepytorch", path) != version) continue;
    tables.push_back({get<std::string>(groups[i], "machine", path),
                      static_cast<int>(get<int64_t>(groups[i], "ranks", path)),
                      parse_table(groups[i], path)});
  }
  return tables;
}

std::string merge_into_profile(const std::string& text,
                               const ProfileKey& key,
                               const TimingTable& table) {
  Array groups = parse_groups(text);
  TimingTable merged;
  if (const auto before = find_in_profile(text, key)) merged = *before;
  for (int index = 0; index < kNumCollectives; ++index) {
    for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
      const auto collective = static_cast<Collective>(index);
      if (!table.at(collective, bucket).empty()) {
        merged.at(collective, bucket) = table.at(collective, bucket);
      }
    }
  }
  std::erase_if(groups, [&](const Value& group) { return describes(group, key, "groups"); });
  Object group = {{"machine", {key.machine}},
                  {"deepytorch", {key.version}},
                  {"ranks", {static_cast<int64_t>(key.group.ranks)}},
                  {"oversubscribed", {key.group.oversubscribed}}};
  if (key.group.on_device()) group.push_back({"on_device", {true}});
  group.push_back({"measured", {dump_table(merged)}});
  groups.push_back({std::move(group)});
  Object profile{{"format", {static_cast<int64_t>(kProfileFormat)}},
                 {"groups", {std::move(groups)}}};
  for (auto& field : other_fields(text)) profile.push_back(std::move(field));
  return json::dump({std::move(profile)});
}

std::string read_profile(const std::string& path) {
  return read_trusted(path, kMaxProfileBytes).value_or("");
}

void write_profile(const std::string& path, const std::string& text) {
  const std::filesystem::path target(path);
  std::error_code error;
  if (target.has_parent_path()) std::filesystem::create_directories(target.parent_path(), error);
  const std::string temporary = path + "." + std::to_string(getpid()) + ".tmp";
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file << text;
    file.close();
    if (!file) {
      const int reason = errno;
      std::remove(temporary.c_str());
      errno = reason;
      throw_system_error("writing " + temporary);
    }
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int reason = errno;
    std::remove(temporary.c_str());
    errno = reason;
    throw_system_error("replacing " + path);
  }
}

}  // namespace dpt
