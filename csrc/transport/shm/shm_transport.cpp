#include "transport/shm/shm_transport.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>

#include "base/error.hpp"
#include "transport/shm/fd_exchange.hpp"

namespace dpt {
namespace {

// A rank whose socket cannot be reached at all (another security domain) must not cost the whole
// operation timeout.
constexpr std::chrono::milliseconds kAttachLimit{30000};

std::string why_not(const std::vector<PeerInfo>& peers, const std::vector<int64_t>& global_ranks) {
  for (size_t i = 1; i < peers.size(); ++i) {
    const std::string pair =
        "ranks " + std::to_string(global_ranks[0]) + " and " + std::to_string(global_ranks[i]);
    if (peers[i].boot_id != peers[0].boot_id) return pair + " are on different nodes";
    if (peers[i].network != peers[0].network) return pair + " are in different network namespaces";
  }
  if (peers.size() + 1 > static_cast<size_t>(kMaxPassedFds) / 2) {
    return std::to_string(peers.size()) + " ranks on one node are more than shared memory serves";
  }
  return "";
}

// Empty where there are none: an old kernel, or a sandbox that forbids them.
UniqueFd open_own_pidfd() {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
  if (fd < 0 && errno != ENOSYS && errno != EPERM && errno != EACCES) {
    throw_system_error("pidfd_open");
  }
  return UniqueFd(fd);
}

// Which ranks have a pidfd, one letter each; those follow the shared memory in the welcome.
std::string list_of(const std::vector<UniqueFd>& pidfds) {
  std::string list;
  for (const UniqueFd& fd : pidfds) list += fd.get() >= 0 ? 'p' : '-';
  return list;
}

// Rank 0: gathers every rank's pidfd, then hands memory and pidfds to all.
ShmConnection lead(const ShmGroup& group, const WaitContext& wait) {
  const int size = static_cast<int>(group.global_ranks.size());
  std::string address;
  UniqueFd listener = listen_abstract(&address);
  UniqueFd memory(Segment::create_file(size, group.max_chunk_bytes));
  std::vector<UniqueFd> pidfds(size);
  pidfds[0] = open_own_pidfd();
  group.store.set(group.key + "/socket", address);

  std::vector<UniqueFd> members(size);
  const Deadline limit(kAttachLimit);
  for (int attached = 1; attached < size;) {
    UniqueFd member = accept_within(listener, wait.deadline.next_slice());
    if (member.get() >= 0) {
      Received hello = receive_fds(member, wait);
      const int rank = std::atoi(hello.text.c_str());  // 0, refused below, for anything else
      if (rank < 1 || rank >= size || hello.fds.size() > 1) {
        throw Error(DPT_ERR_SYSTEM, "a local process sent a malformed greeting");
      }
      if (!hello.fds.empty()) pidfds[rank] = std::move(hello.fds[0]);
      members[rank] = std::move(member);
      ++attached;
      continue;
    }
    wait.check();
    for (int rank = 1; rank < size; ++rank) {
      if (members[rank].get() >= 0) continue;
      const auto refused = group.store.get(group.key + "/refused/" + std::to_string(rank),
                                           std::chrono::milliseconds(1));
      if (refused || limit.expired()) {
        throw Error(DPT_ERR_SYSTEM,
                    "rank " + std::to_string(group.global_ranks[rank]) +
                        " could not attach: " + refused.value_or("no answer"));
      }
    }
  }

  std::vector<int> shared = {memory.get()};
  for (const UniqueFd& fd : pidfds) {
    if (fd.get() >= 0) shared.push_back(fd.get());
  }
  for (int rank = 1; rank < size; ++rank) send_fds(members[rank], list_of(pidfds), shared);
  ShmConnection connection;
  connection.segment = std::make_unique<Segment>(memory.release(), 0, group.global_ranks);
  for (UniqueFd& fd : pidfds) connection.pidfds.push_back(fd.release());
  return connection;
}

ShmConnection join(const ShmGroup& group, const std::string& address, const WaitContext& wait) {
  UniqueFd socket = connect_abstract(address);
  const UniqueFd own = open_own_pidfd();
  send_fds(socket,
           std::to_string(group.rank),
           own.get() < 0 ? std::vector<int>{} : std::vector<int>{own.get()});
  Received welcome = receive_fds(socket, wait);
  const auto num_pidfds = std::count(welcome.text.begin(), welcome.text.end(), 'p');
  if (welcome.text.size() != group.global_ranks.size() ||
      welcome.fds.size() != static_cast<size_t>(num_pidfds) + 1) {
    throw Error(DPT_ERR_SYSTEM, "rank 0 sent a malformed welcome");
  }
  ShmConnection connection;
  connection.segment =
      std::make_unique<Segment>(welcome.fds[0].release(), group.rank, group.global_ranks);
  auto next = welcome.fds.begin() + 1;
  for (const char has : welcome.text) {
    connection.pidfds.push_back(has == 'p' ? (next++)->release() : -1);
  }
  return connection;
}

void close_all(ShmConnection* connection) {
  for (const int fd : connection->pidfds) {
    if (fd >= 0) close(fd);
  }
  *connection = ShmConnection();
}

}  // namespace

const Transport kShmTransport{"shm", why_not};

// NOTE [One verdict] Attaching can fail on one rank alone (a security module, a descriptor limit).
// Each rank publishes how it went and reads what the others published, so that all of them take the
// native way or none does.
ShmConnection connect_shm(const ShmGroup& group, const WaitContext& wait) {
  ShmConnection connection;
  std::string outcome = "ok";
  try {
    if (group.rank == 0) {
      connection = lead(group, wait);
    } else {
      const std::string address = wait_for_key(
          group.store, group.key + "/socket", wait, "rank 0 of the group did not come");
      if (address == "none") throw Error(DPT_ERR_SYSTEM, "rank 0 could not lead");
      connection = join(group, address, wait);
    }
  } catch (const Error& error) {
    if (error.status() != DPT_ERR_SYSTEM) throw;
    outcome = error.what();
    if (group.rank == 0) {
      group.store.set(group.key + "/socket", "none");
    } else {
      group.store.set(group.key + "/refused/" + std::to_string(group.rank), outcome);
    }
  }
  const std::vector<std::string> outcomes = all_gather(
      group.store, group.key + "/attached", group.rank, group.global_ranks, outcome, wait);
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank] == "ok") continue;
    close_all(&connection);
    connection.why_not = "rank " + std::to_string(group.global_ranks[rank]) +
                         " has no shared memory with its group: " + outcomes[rank];
    break;
  }
  return connection;
}

}  // namespace dpt
