#include "bootstrap/exchange.hpp"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <thread>

#include "base/error.hpp"
#include "base/random_bytes.hpp"

namespace dpt {
namespace {

constexpr const char* kUnknown = "unknown";

std::string read_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Without /proc a node is known by its name alone.
std::string this_boot() {
  std::string id = read_line("/proc/sys/kernel/random/boot_id");
  if (!id.empty()) return id;
  utsname system{};
  uname(&system);
  return std::string("unknown-") + system.nodename;
}

std::string read_link(const char* path) {
  char target[256];
  const ssize_t length = readlink(path, target, sizeof target);
  return length > 0 ? std::string(target, length) : kUnknown;
}

}  // namespace

std::string PeerInfo::serialize() const {
  std::ostringstream out;
  out << process << ' ' << boot_id << ' ' << network << ' ' << node << ' ' << pid << ' '
      << usable_cores << ' ' << max_chunk_bytes << ' ' << fixed_chunk_bytes << ' '
      << affinity.size();
  for (const uint64_t word : affinity) out << ' ' << word;
  out << ' ' << mark;
  return out.str();
}

PeerInfo PeerInfo::parse(const std::string& text) {
  std::istringstream in(text);
  PeerInfo info;
  size_t words = 0;
  in >> info.process >> info.boot_id >> info.network >> info.node >> info.pid >>
      info.usable_cores >> info.max_chunk_bytes >> info.fixed_chunk_bytes >> words;
  if (in && words <= 1024) {
    info.affinity.resize(words);
    for (uint64_t& word : info.affinity) in >> word;
    std::getline(in >> std::ws, info.mark);
  }
  if (!in || words > 1024) {
    throw Error(DPT_ERR_INVALID,
                "a rank published malformed peer information: is the same version of deepytorch "
                "installed on every rank?");
  }
  return info;
}

PeerInfo PeerInfo::of_this_process() {
  PeerInfo info;
  info.boot_id = this_boot();
  info.network = read_link("/proc/self/ns/net");
  info.node = info.boot_id + "@" + info.network;
  info.pid = getpid();
  info.mark = own_process_mark();
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) {
    info.affinity.assign(CPU_SETSIZE / 64, 0);
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &cores)) info.affinity[core / 64] |= uint64_t{1} << (core % 64);
    }
    while (!info.affinity.empty() && info.affinity.back() == 0) info.affinity.pop_back();
  }
  return info;
}

std::string wait_for_key(Store& store,
                         const std::string& key,
                         const WaitContext& wait,
                         const std::string& what) {
  // Absent keys are asked for in short slices: torch's stores cannot be interrupted inside a get.
  for (;;) {
    if (auto value = store.get(key, wait.deadline.next_slice())) return *value;
    wait.check();
    if (wait.deadline.expired()) throw Error(DPT_ERR_TIMEOUT, wait.describe() + ": " + what);
  }
}

namespace {

constexpr std::chrono::milliseconds kLook{1};

bool present(Store& store, const std::string& key) { return store.get(key, kLook).has_value(); }

std::string limit_of(const WaitContext& wait) {
  return " within the timeout of " + std::to_string(wait.deadline.timeout().count()) + " ms";
}

// `complete`: what is wrong if all have come.
[[noreturn]] void throw_missing(Store& store,
                                const std::string& key,
                                const std::vector<int64_t>& global_ranks,
                                const WaitContext& wait,
                                const std::string& complete) {
  std::string made;     // of those that are missing, who made the group
  std::string unknown;  // and who did not
  for (size_t peer = 0; peer < global_ranks.size(); ++peer) {
    if (present(store, key + "/" + std::to_string(peer))) continue;
    std::string& ranks = present(store, kProcessKey + std::to_string(peer)) ? made : unknown;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(global_ranks[peer]);
  }
  std::string text;
  if (!unknown.empty()) {
    text = "rank(s) " + unknown + " did not join" + limit_of(wait) +
           " and have not made the group: did they crash, or run without deepytorch?";
  }
  if (!made.empty()) {
    text += (text.empty() ? "rank(s) " : " Rank(s) ") + made + " did not join" + limit_of(wait) +
            " though they have made the group: was this call skipped there, or are they busy?";
  }
  throw Error(DPT_ERR_TIMEOUT, wait.describe() + ": " + (text.empty() ? complete : text));
}

// Values under key/0 .. key/size-1, waiting for each.
std::vector<std::string> collect(Store& store,
                                 const std::string& key,
                                 const std::vector<int64_t>& global_ranks,
                                 const WaitContext& wait) {
  std::vector<std::string> all(global_ranks.size());
  for (size_t peer = 0; peer < all.size(); ++peer) {
    try {
      all[peer] = wait_for_key(store, key + "/" + std::to_string(peer), wait, "");
    } catch (const Error& error) {
      if (error.status() != DPT_ERR_TIMEOUT) throw;
      throw_missing(store,
                    key,
                    global_ranks,
                    wait,
                    "not all ranks joined" + limit_of(wait) +
                        "; by now all have. A longer timeout would have been enough");
    }
  }
  return all;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::vector<std::string> all_gather(Store& store,
                                    const std::string& key,
                                    int rank,
                                    const std::vector<int64_t>& global_ranks,
                                    const std::string& mine,
                                    const WaitContext& wait) {
  store.set(key + "/" + std::to_string(rank), mine);
  return collect(store, key, global_ranks, wait);
}

Meeting meet(Store& store,
             int rank,
             const std::vector<int64_t>& global_ranks,
             const std::string& mine,
             const WaitContext& wait) {
  constexpr const char* kAnnouncement = "deepytorch/meeting";
  const std::string leader = "rank " + std::to_string(global_ranks[0]);
  const std::string answer = random_id() + " " + mine;
  Meeting meeting;
  auto key = [&](const char* name) { return "deepytorch/" + meeting.id + "/" + name; };

  std::vector<std::string> answers;
  if (rank == 0) {
    meeting.id = random_id();
    store.set(key("answer") + "/0", answer);
    store.set(kAnnouncement, meeting.id);
    answers = collect(store, key("answer"), global_ranks, wait);
    std::string list;
    for (const std::string& line : answers) list += line + "\n";
    store.set(key("list"), list);
  }
  while (answers.empty()) {
    const auto announced = store.get(kAnnouncement, wait.deadline.next_slice());
    if (announced && *announced != meeting.id) {
      meeting.id = *announced;
      store.set(key("answer") + "/" + std::to_string(rank), answer);
    }
    const auto list = announced ? store.get(key("list"), wait.deadline.next_slice()) : std::nullopt;
    if (list) {
      answers = split_lines(*list);
      if (answers.size() == global_ranks.size() && answers[rank] == answer) break;
      // The list of an earlier meeting: rank 0 has not announced this one yet.
      answers.clear();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    wait.check();
    if (!wait.deadline.expired()) continue;
    // Without an announcement nobody could have answered: then it is rank 0 that is missing.
    throw_missing(store,
                  key("answer"),
                  meeting.id.empty() ? std::vector{global_ranks[0]} : global_ranks,
                  wait,
                  leader + " did not bring the meeting of all ranks to its end" + limit_of(wait) +
                      ": is it busy or stopped, or is its own time limit shorter?");
  }
  for (const std::string& line : answers) {
    meeting.words.push_back(line.substr(line.find(' ') + 1));
  }
  return meeting;
}

namespace {

// Start time in clock ticks since boot, or nothing when there is no such process any more. Field 22
// of /proc/<pid>/stat; the name in field 2 may hold spaces and brackets.
std::optional<std::string> start_time_of(const std::string& pid) {
  const std::string line = read_line(("/proc/" + pid + "/stat").c_str());
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream in(line.substr(name_end + 1));
  std::string field;
  in >> field;
  if (field == "Z" || field == "X") return std::nullopt;  // dead, not yet waited for
  for (int number = 4; number <= 22; ++number) in >> field;
  return field;
}

// This process's; nothing without a /proc, or with one of another pid namespace, in which the
// numbers are other processes'.
std::optional<std::string> own_start_time() {
  const std::string pid = std::to_string(getpid());
  return read_link("/proc/self") == pid ? start_time_of(pid) : std::nullopt;
}

}  // namespace

std::string own_process_mark() {
  return this_boot() + " " + read_link("/proc/self/ns/pid") + " " + std::to_string(getpid()) + " " +
         own_start_time().value_or(kUnknown);
}

std::string stamp_of_now() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  const int64_t ticks_per_s = sysconf(_SC_CLK_TCK);
  return std::to_string(now.tv_sec * ticks_per_s + now.tv_nsec * ticks_per_s / 1'000'000'000);
}

std::optional<std::string> dead_process(const std::string& mark) {
  std::istringstream in(mark);
  std::string boot_id, pid_namespace, pid, start;
  in >> boot_id >> pid_namespace >> pid >> start;
  const std::optional<std::string> own_start = own_start_time();
  const bool visible = own_start && start != kUnknown && boot_id == this_boot() &&
                       pid_namespace == read_link("/proc/self/ns/pid");
  if (!in || !visible || start_time_of(pid) == start) return std::nullopt;
  uint64_t left = 0;
  uint64_t own = 0;
  std::istringstream(*own_start) >> own;
  if (in >> left && left < own) return std::nullopt;
  return pid;
}

std::string random_id() {
  unsigned char bytes[16];
  fill_random(bytes, sizeof bytes);
  static const char* digits = "0123456789abcdef";
  std::string id;
  for (const unsigned char byte : bytes) {
    id += digits[byte >> 4];
    id += digits[byte & 15];
  }
  return id;
}

}  // namespace dpt
