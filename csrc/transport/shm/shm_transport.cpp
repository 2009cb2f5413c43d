#include "transport/shm/shm_transport.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <deque>
#include <mutex>
#include <sstream>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "transport/shm/fd_exchange.hpp"

// Linux has it since 5.3; the headers of the C libraries that wheels are made for know it later.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace dpt {
namespace {

// A rank whose socket cannot be reached at all (another security domain) must not cost the whole
// operation timeout.
constexpr std::chrono::milliseconds kAttachLimit{30000};

// A rank that attached publishes one of these; anything else says why it could not.
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

std::string why_not_shm(const std::vector<PeerInfo>& peers,
                        const std::vector<int64_t>& global_ranks) {
  for (size_t i = 1; i < peers.size(); ++i) {
    const std::string pair =
        "ranks " + std::to_string(global_ranks[0]) + " and " + std::to_string(global_ranks[i]);
    if (peers[i].boot_id != peers[0].boot_id) return pair + " are on different nodes";
    if (peers[i].network != peers[0].network) return pair + " are in different network namespaces";
    if (peers[i].node != peers[0].node) return pair + " pretend to be on different nodes";
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

// A rank brings these: its pidfd and the file of its pool, each if it has one.
struct Belongings {
  UniqueFd pidfd;
  UniqueFd pool;

  static Belongings of_this_process(MemoryPool& own_pool) {
    Belongings own{open_own_pidfd(), {}};
    try {
      own.pool = UniqueFd(DPT_SYS_CHECK(fcntl(own_pool.file(), F_DUPFD_CLOEXEC, 0)));
    } catch (const Error& error) {
      tell_of_pools(error);
    }
    return own;
  }

  // On the way: a word that says what follows, and the descriptors.
  std::string word() const {
    return std::string(pidfd.get() >= 0 ? "p" : "-") + (pool.get() >= 0 ? "m" : "-");
  }
  void append_to(std::vector<int>* fds) const {
    if (pidfd.get() >= 0) fds->push_back(pidfd.get());
    if (pool.get() >= 0) fds->push_back(pool.get());
  }
  // Takes from the front of `fds`; Error when there are too few.
  static Belongings take(const std::string& word, std::deque<UniqueFd>* fds) {
    Belongings taken;
    for (const auto& [letter, to] : {std::pair{'p', &taken.pidfd}, std::pair{'m', &taken.pool}}) {
      if (word.find(letter) == std::string::npos) continue;
      if (fds->empty()) throw Error(DPT_ERR_SYSTEM, "a local process sent too few descriptors");
      *to = std::move(fds->front());
      fds->pop_front();
    }
    return taken;
  }
};

// A rank has these after the exchange.
struct Exchanged {
  UniqueFd memory;
  std::vector<Belongings> ranks;
};

// Rank 0: gathers what every rank brings, then hands the memory and all of it to all.
Exchanged lead(const ShmGroup& group, const WaitContext& wait) {
  const int size = static_cast<int>(group.global_ranks.size());
  std::string address;
  const KeyedSocket listener = listen_abstract(&address);
  Exchanged exchanged{UniqueFd(Segment::create_file(size, group.max_chunk_bytes)), {}};
  exchanged.ranks.resize(size);
  exchanged.ranks[0] = Belongings::of_this_process(group.own_pool);
  group.store.set(group.key + "/socket", address);

  std::vector<UniqueFd> members(size);
  const Deadline limit(kAttachLimit);
  for (int attached = 1; attached < size;) {
    UniqueFd member = accept_within(listener, wait.deadline.next_slice());
    if (member.get() >= 0) {
      Received hello = receive_fds(member, wait);
      std::istringstream words(hello.text);
      int rank = 0;  // refused below, as is anything that is not a number
      std::string word;
      words >> rank >> word;
      if (rank < 1 || rank >= size) {
        throw Error(DPT_ERR_SYSTEM, "a local process sent a malformed greeting");
      }
      exchanged.ranks[rank] = Belongings::take(word, &hello.fds);
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

  std::string text;
  std::vector<int> fds = {exchanged.memory.get()};
  for (const Belongings& rank : exchanged.ranks) {
    text += rank.word() + " ";
    rank.append_to(&fds);
  }
  for (int rank = 1; rank < size; ++rank) send_fds(members[rank], text, fds);
  return exchanged;
}

Exchanged join(const ShmGroup& group, const std::string& address, const WaitContext& wait) {
  const UniqueFd socket = connect_abstract(address, wait);
  await_acceptance(socket, wait);
  const Belongings own = Belongings::of_this_process(group.own_pool);
  std::vector<int> fds;
  own.append_to(&fds);
  send_fds(socket, std::to_string(group.rank) + " " + own.word(), fds);

  Received welcome = receive_fds(socket, wait);
  if (welcome.fds.empty()) throw Error(DPT_ERR_SYSTEM, "rank 0 sent a malformed welcome");
  Exchanged exchanged{std::move(welcome.fds.front()), {}};
  welcome.fds.pop_front();
  std::istringstream words(welcome.text);
  for (std::string word; words >> word;) {
    exchanged.ranks.push_back(Belongings::take(word, &welcome.fds));
  }
  if (exchanged.ranks.size() != group.global_ranks.size()) {
    throw Error(DPT_ERR_SYSTEM, "rank 0 sent a malformed welcome");
  }
  return exchanged;
}

// Maps each rank's pool here; ranks that are threads of this process share its own. Empty when one
// can't be had: "attached" then tells the others.
std::vector<char*> map_pools(const ShmGroup& group,
                             const std::vector<Belongings>& ranks,
                             std::vector<std::shared_ptr<const MappedPool>>* pools) {
  std::vector<char*> bases;
  try {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (ranks[rank].pool.get() < 0) return {};
      const std::string& process = group.peers[rank].process;
      if (process == group.peers[group.rank].process) {
        bases.push_back(group.own_pool.base());
        continue;
      }
      pools->push_back(group.peer_pools.map(ranks[rank].pool));
      bases.push_back(pools->back()->base());
    }
  } catch (const Error& error) {
    tell_of_pools(error);
    bases.clear();
  }
  return bases;
}

}  // namespace

const Transport kShmTransport{"shm", why_not_shm};

// NOTE [One verdict] Attaching can fail on one rank alone (a security module, a descriptor limit).
// So can mapping the peers' pools (limited address space). Each rank publishes how it went and
// reads what the others published. So all ranks take the native way or none does. Likewise all
// ranks use registered memory or none does.
ShmConnection connect_shm(const ShmGroup& group, const WaitContext& wait) {
  ShmConnection connection;
  connection.own_pool = group.own_pool.hold();
  std::vector<char*> bases;
  std::string outcome = kWithoutPools;
  try {
    Exchanged exchanged;
    if (group.rank == 0) {
      exchanged = lead(group, wait);
    } else {
      const std::string address = wait_for_key(
          group.store, group.key + "/socket", wait, "rank 0 of the group did not come");
      if (address == "none") throw Error(DPT_ERR_SYSTEM, "rank 0 could not lead");
      exchanged = join(group, address, wait);
    }
    connection.segment =
        std::make_unique<Segment>(exchanged.memory.release(), group.rank, group.global_ranks);
    for (Belongings& rank : exchanged.ranks) connection.pidfds.push_back(std::move(rank.pidfd));
    bases = map_pools(group, exchanged.ranks, &connection.pools);
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
    connection = {};
    connection.why_not = "rank " + std::to_string(group.global_ranks[rank]) +
                         " has no shared memory with its group: " + outcomes[rank];
    return connection;
  }
  if (all_have_pools) {
    connection.segment->set_pools(&group.own_pool, std::move(bases));
  } else {
    connection.pools.clear();
    connection.own_pool.reset();
  }
  return connection;
}

}  // namespace dpt
