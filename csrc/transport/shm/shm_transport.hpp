// Shared memory between processes of one node. It is a memfd made by the group's rank 0 and passed
// over an abstract UNIX socket. So nothing ever appears in /dev/shm, and its size limit does not
// matter. With the memfd go each rank's pidfd and the file of its memory pool.
#pragma once

#include <memory>

#include "base/unique_fd.hpp"
#include "base/wait.hpp"
#include "bootstrap/store.hpp"
#include "transport/shm/memory_pool.hpp"
#include "transport/shm/peer_pools.hpp"
#include "transport/shm/segment.hpp"
#include "transport/transport.hpp"

namespace dpt {

extern const Transport kShmTransport;

struct ShmConnection {
  std::unique_ptr<Segment> segment;  // nullptr: no shared memory here, see why_not
  // One per rank, which becomes readable at its death; some have none.
  std::vector<UniqueFd> pidfds;
  // The peers' pools, already known to the segment; keep them as long as that. Empty when some rank
  // can't take part: then no rank of the group uses registered memory.
  std::vector<std::shared_ptr<const MappedPool>> pools;
  MemoryPool::Hold own_pool;  // likewise
  std::string why_not;        // the same text on every rank
};

struct ShmGroup {
  Store& store;
  std::string key;  // prefix of this group's keys, fresh for every meeting
  int rank;
  const std::vector<int64_t>& global_ranks;
  const std::vector<PeerInfo>& peers;
  size_t max_chunk_bytes;  // of the segment's slots
  MemoryPool& own_pool;
  PeerPools& peer_pools;
};

// Collective over the group's ranks. Throws on timeout and interrupt; a rank that cannot attach
// makes every rank return the same `why_not`.
ShmConnection connect_shm(const ShmGroup& group, const WaitContext& wait);

}  // namespace dpt
