#include "transport/shm/shm_transport.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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

// Empty where there are none: an old kernel, or a sandbox that forbids them.
UniqueFd open_own_pidfd() {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
  if (fd < 0 && errno != ENOSYS && errno != EPERM && errno != EACCES) {
    throw_system_error("pidfd_open");
  }
  return UniqueFd(fd);
}

// What a rank passes to the others, as far as it has it.
struct RankFds {
  UniqueFd pidfd;
  UniqueFd pool;
};

RankFds own_fds(MemoryPool& pool) {
  RankFds own{open_own_pidfd(), UniqueFd()};
  try {
    own.pool = UniqueFd(DPT_SYS_CHECK(fcntl(pool.file(), F_DUPFD_CLOEXEC, 0)));
  } catch (const Error& error) {
    tell_of_pools(error);
  }
  return own;
}

// A message's text says which descriptors it has, one letter per rank; they follow in that order,
// a rank's pidfd before its pool.
char letter_of(const RankFds& fds) {
  const bool pidfd = fds.pidfd.get() >= 0;
  const bool pool = fds.pool.get() >= 0;
  return pidfd ? (pool ? 'b' : 'p') : (pool ? 'm' : '-');
}

void append(const RankFds& fds, std::vector<int>* list) {
  for (const UniqueFd* fd : {&fds.pidfd, &fds.pool}) {
    if (fd->get() >= 0) list->push_back(fd->get());
  }
}

// The ranks' descriptors of `message`, from its descriptor number `first` on.
std::vector<RankFds> parse(Received* message, const std::string& letters, size_t first) {
  std::vector<RankFds> ranks;
  auto next =
      message->fds.begin() + static_cast<std::ptrdiff_t>(std::min(first, message->fds.size()));
  const auto take = [&] {
    if (next == message->fds.end()) throw Error(DPT_ERR_SYSTEM, "a local rank's message is short");
    return std::move(*next++);
  };
  for (const char letter : letters) {
    RankFds& fds = ranks.emplace_back();
    if (letter == 'b' || letter == 'p') fds.pidfd = take();
    if (letter == 'b' || letter == 'm') fds.pool = take();
  }
  if (next != message->fds.end()) throw Error(DPT_ERR_SYSTEM, "a local rank's message is long");
  return ranks;
}

// What a rank has after the exchange. `pools` has one file per rank, or none.
struct Exchanged {
  ShmConnection connection;
  std::vector<UniqueFd> pools;
};

Exchanged finish(const ShmGroup& group, UniqueFd memory, std::vector<RankFds> ranks) {
  Exchanged exchanged;
  exchanged.connection.segment =
      std::make_unique<Segment>(memory.release(), group.rank, group.global_ranks);
  const bool all_have_pools = std::all_of(
      ranks.begin(), ranks.end(), [](const RankFds& fds) { return fds.pool.get() >= 0; });
  for (RankFds& fds : ranks) {
    exchanged.connection.pidfds.push_back(fds.pidfd.release());
    if (all_have_pools) exchanged.pools.push_back(std::move(fds.pool));
  }
  return exchanged;
}

// Rank 0: gathers every rank's descriptors, then hands memory, pidfds and pools to all.
Exchanged lead(const ShmGroup& group, const WaitContext& wait) {
  const int size = static_cast<int>(group.global_ranks.size());
  std::string address;
  UniqueFd listener = listen_abstract(&address);
  UniqueFd memory(Segment::create_file(size, group.max_chunk_bytes));
  std::vector<RankFds> ranks(size);
  ranks[0] = own_fds(group.own_pool);
  group.store.set(group.key + "/socket", address);

  std::vector<UniqueFd> members(size);
  const Deadline limit(kAttachLimit);
  for (int attached = 1; attached < size;) {
    UniqueFd member = accept_within(listener, wait.deadline.next_slice());
    if (member.get() >= 0) {
      Received hello = receive_fds(member, wait);
      const int rank = std::atoi(hello.text.c_str());  // 0, refused below, for anything else
      if (rank < 1 || rank >= size) {
        throw Error(DPT_ERR_SYSTEM, "a local process sent a malformed greeting");
      }
      ranks[rank] = std::move(parse(&hello, hello.text.substr(hello.text.size() - 1), 0)[0]);
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
  std::string letters;
  for (const RankFds& fds : ranks) {
    letters += letter_of(fds);
    append(fds, &shared);
  }
  for (int rank = 1; rank < size; ++rank) send_fds(members[rank], letters, shared);
  return finish(group, std::move(memory), std::move(ranks));
}

Exchanged join(const ShmGroup& group, const std::string& address, const WaitContext& wait) {
  UniqueFd socket = connect_abstract(address);
  const RankFds own = own_fds(group.own_pool);
  std::vector<int> passed;
  append(own, &passed);
  send_fds(socket, std::to_string(group.rank) + ' ' + letter_of(own), passed);
  Received welcome = receive_fds(socket, wait);
  if (welcome.fds.empty() || welcome.text.size() != group.global_ranks.size()) {
    throw Error(DPT_ERR_SYSTEM, "rank 0 sent a malformed welcome");
  }
  std::vector<RankFds> ranks = parse(&welcome, welcome.text, 1);
  return finish(group, std::move(welcome.fds[0]), std::move(ranks));
}

// Where each rank's pool is here; ranks that are threads of this process share its own. Empty when
// one can't be had: "attached" then tells the others.
std::vector<char*> map_pools(const ShmGroup& group, Exchanged* exchanged) {
  std::vector<char*> bases;
  try {
    for (size_t rank = 0; rank < exchanged->pools.size(); ++rank) {
      const std::string& process = group.peers[rank].process;
      if (process == group.peers[group.rank].process) {
        bases.push_back(group.own_pool.base());
        continue;
      }
      exchanged->connection.pools.push_back(group.peer_pools.map(process, exchanged->pools[rank]));
      bases.push_back(exchanged->connection.pools.back()->base());
    }
  } catch (const Error& error) {
    tell_of_pools(error);
    bases.clear();
  }
  return bases;
}

void close_all(ShmConnection* connection) {
  for (const int fd : connection->pidfds) {
    if (fd >= 0) close(fd);
  }
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
