#include "transport/shm/shm_transport.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <mutex>

#include "base/error.hpp"
#include "base/log.hpp"
#include "transport/shm/fd_exchange.hpp"

namespace dpt {
namespace {

// A rank whose socket cannot be reached at all (another security domain) must not cost the whole
// operation timeout.
constexpr std::chrono::milliseconds kAttachLimit{30000};

// What a rank that attached publishes; anything else says why it could not.
constexpr char kWithPools[] = "ok";
constexpr char kWithoutPools[] = "ok without registered memory";

// A group works without registered memory, only slower.
void tell_of_pools(const Error& error) {
  static std::once_flag once;
  std::call_once(once, [&] {
    log(LogLevel::kWarning,
        std::string("tensors in registered memory go the way of ordinary ones here: ") +
            error.what());
  });
}

std::string why_not(const std::vector<PeerInfo>& peers, const std::vector<int64_t>& global_ranks) {
  for (size_t i = 1; i < peers.size(); ++i) {
    const std::string pair =
        "ranks " + std::to_string(global_ranks[0]) + " and " + std::to_string(global_ranks[i]);
    if (peers[i].boot_id != peers[0].boot_id) return pair + " are on different nodes";
    if (peers[i].network != peers[0].network) return pair + " are in different network namespaces";
  }
  // The segment, and of each rank its pidfd and its pool.
  if (1 + 2 * peers.size() > static_cast<size_t>(kMaxPassedFds)) {
    return std::to_string(peers.size()) + " ranks on one node are more than shared memory serves";
  }
  return "";
}

int open_own_pidfd() {
  return DPT_SYS_CHECK(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
}

// What a rank brings: its pidfd and, when it has one, the file of its pool.
std::vector<int> own_fds(const UniqueFd& pidfd, MemoryPool& pool) {
  std::vector<int> fds = {pidfd.get()};
  try {
    fds.push_back(pool.file());
  } catch (const Error& error) {
    tell_of_pools(error);
  }
  return fds;
}

// What a rank has after the exchange. `pool_fds` has one descriptor per rank, or none.
struct Exchanged {
  ShmConnection connection;
  std::vector<UniqueFd> pool_fds;
};

// Rank 0: gathers every rank's descriptors, then hands memory, pidfds and pools to all.
Exchanged lead(const ShmGroup& group, const WaitContext& wait) {
  const int size = static_cast<int>(group.global_ranks.size());
  std::string address;
  UniqueFd listener = listen_abstract(&address);
  UniqueFd memory(Segment::create_file(size));
  std::vector<UniqueFd> pidfds(size);
  std::vector<UniqueFd> pools(size);
  bool all_have_pools = true;
  pidfds[0] = UniqueFd(open_own_pidfd());
  if (const std::vector<int> own = own_fds(pidfds[0], group.own_pool); own.size() == 2) {
    pools[0] = UniqueFd(DPT_SYS_CHECK(fcntl(own[1], F_DUPFD_CLOEXEC, 0)));
  } else {
    all_have_pools = false;
  }
  group.store.set(group.key + "/socket", address);

  std::vector<UniqueFd> members(size);
  const Deadline limit(kAttachLimit);
  for (int attached = 1; attached < size;) {
    UniqueFd member = accept_within(listener, wait.deadline.next_slice());
    if (member.get() >= 0) {
      Received hello = receive_fds(member, wait);
      const int rank = std::atoi(hello.text.c_str());  // 0, refused below, for anything else
      if (rank < 1 || rank >= size || hello.fds.empty() || hello.fds.size() > 2) {
        throw Error(DPT_ERR_SYSTEM, "a local process sent a malformed greeting");
      }
      pidfds[rank] = std::move(hello.fds[0]);
      if (hello.fds.size() == 2) {
        pools[rank] = std::move(hello.fds[1]);
      } else {
        all_have_pools = false;
      }
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
  for (const UniqueFd& fd : pidfds) shared.push_back(fd.get());
  if (!all_have_pools) pools.clear();
  for (const UniqueFd& fd : pools) shared.push_back(fd.get());
  for (int rank = 1; rank < size; ++rank) send_fds(members[rank], "welcome", shared);
  Exchanged exchanged;
  exchanged.connection.segment = std::make_unique<Segment>(memory.release(), 0, group.global_ranks);
  for (UniqueFd& fd : pidfds) exchanged.connection.pidfds.push_back(fd.release());
  exchanged.pool_fds = std::move(pools);
  return exchanged;
}

Exchanged join(const ShmGroup& group, const std::string& address, const WaitContext& wait) {
  const size_t size = group.global_ranks.size();
  UniqueFd socket = connect_abstract(address);
  const UniqueFd pidfd(open_own_pidfd());
  send_fds(socket, std::to_string(group.rank), own_fds(pidfd, group.own_pool));
  Received welcome = receive_fds(socket, wait);
  if (welcome.fds.size() != 1 + size && welcome.fds.size() != 1 + 2 * size) {
    throw Error(DPT_ERR_SYSTEM, "rank 0 sent a malformed welcome");
  }
  Exchanged exchanged;
  exchanged.connection.segment =
      std::make_unique<Segment>(welcome.fds[0].release(), group.rank, group.global_ranks);
  for (size_t i = 1; i < welcome.fds.size(); ++i) {
    if (i <= size) {
      exchanged.connection.pidfds.push_back(welcome.fds[i].release());
    } else {
      exchanged.pool_fds.push_back(std::move(welcome.fds[i]));
    }
  }
  return exchanged;
}

// Where each rank's pool is here; ranks that are threads of this process share its own. Empty when
// one can't be had: "attached" then tells the others.
std::vector<char*> map_pools(const ShmGroup& group, Exchanged* exchanged) {
  std::vector<char*> bases;
  try {
    for (size_t rank = 0; rank < exchanged->pool_fds.size(); ++rank) {
      const std::string& process = group.peers[rank].process;
      if (process == group.peers[group.rank].process) {
        bases.push_back(group.own_pool.base());
        continue;
      }
      exchanged->connection.pools.push_back(
          group.peer_pools.map(process, exchanged->pool_fds[rank]));
      bases.push_back(exchanged->connection.pools.back()->base());
    }
  } catch (const Error& error) {
    tell_of_pools(error);
    bases.clear();
  }
  return bases;
}

void close_all(ShmConnection* connection) {
  for (const int fd : connection->pidfds) close(fd);
  *connection = ShmConnection();
}

}  // namespace

const Transport kShmTransport{"shm", why_not};

// NOTE [One verdict] Attaching can fail on one rank alone (a security module, a descriptor limit),
// and so can mapping the peers' pools (limited address space). Each rank publishes how it went and
// reads what the others published, so that all of them take the native way, and all of them use
// registered memory, or none does.
ShmConnection connect_shm(const ShmGroup& group, const WaitContext& wait) {
  Exchanged exchanged;
  ShmConnection& connection = exchanged.connection;
  std::vector<char*> bases;
  std::string outcome = kWithoutPools;
  try {
    if (group.rank == 0) {
      exchanged = lead(group, wait);
    } else {
      const std::string address = wait_for_key(
          group.store, group.key + "/socket", wait, "rank 0 of the group did not come");
      if (address == "none") throw Error(DPT_ERR_SYSTEM, "rank 0 could not lead");
      exchanged = join(group, address, wait);
    }
    bases = map_pools(group, &exchanged);
    if (!bases.empty()) outcome = kWithPools;
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
  bool all_have_pools = true;
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank] == kWithPools) continue;
    all_have_pools = false;
    if (outcomes[rank] == kWithoutPools) continue;
    close_all(&connection);
    connection.why_not = "rank " + std::to_string(group.global_ranks[rank]) +
                         " has no shared memory with its group: " + outcomes[rank];
    return std::move(connection);
  }
  if (all_have_pools) {
    connection.segment->set_pools(&group.own_pool, std::move(bases));
  } else {
    connection.pools.clear();
  }
  return std::move(connection);
}

}  // namespace dpt
