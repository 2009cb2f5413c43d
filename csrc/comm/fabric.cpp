#include "comm/fabric.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>

#include "base/env.hpp"
#include "comm/flight_record.hpp"
#include "comm/invitations.hpp"
#include "cuda/device_group.hpp"
#include "topology/topology.hpp"

namespace dpt {
namespace {

std::atomic<Fabric*> the_fabric{nullptr};
std::atomic<bool> in_forked_child{false};

int count_cores(const std::vector<uint64_t>& affinity) {
  int cores = 0;
  for (const uint64_t word : affinity) cores += std::popcount(word);
  return cores;
}

// Whether the peer's pid means here what it means there.
bool sees_same_processes(const PeerInfo& peer) {
  const auto place_of = [](const std::string& mark) {
    return mark.substr(0, mark.find(' ', mark.find(' ') + 1));  // boot id and namespace
  };
  return place_of(peer.mark) == place_of(own_process_mark());
}

}  // namespace

Fabric& Fabric::instance() {
  static Fabric* const fabric = [] {
    auto* const made = new Fabric;
    the_fabric = made;
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
    return made;
  }();
  return *fabric;
}

bool Fabric::forked() { return in_forked_child.load(std::memory_order_relaxed); }

void Fabric::after_fork_in_child() {
  // A child's child: the numbers of what was closed are by now those of its own files.
  if (in_forked_child.exchange(true)) return;
  FlightRecord::close_after_fork();
  DeviceGroup::after_fork();
  Fabric* const fabric = the_fabric;
  if (fabric == nullptr) return;
  fabric->memory_.after_fork();
  fabric->reactor_.close_after_fork();
  if (fabric->watchdog_) fabric->watchdog_->close_after_fork();
  Invitations::after_fork();
}

Fabric::Fabric() : self_(PeerInfo::of_this_process()) {
  self_.process = random_id();
  self_.usable_cores = usable_cores();
  emulated_nodes_ = env().node_ids;
}

PeerInfo Fabric::self(int64_t global_rank) const {
  std::lock_guard lock(mutex_);
  PeerInfo info = self_;
  if (!emulated_nodes_.empty()) {
    info.node = "emulated:" + emulated_nodes_[global_rank % emulated_nodes_.size()];
  }
  return info;
}

void Fabric::emulate_nodes(std::vector<std::string> names) {
  std::lock_guard lock(mutex_);
  emulated_nodes_ = std::move(names);
}

size_t Fabric::offer_chunk_bytes(int size, size_t staging_bytes) {
  constexpr size_t kDefaultStagingBytes = 32 << 20;
  if (staging_bytes == 0) staging_bytes = kDefaultStagingBytes;
  std::lock_guard lock(mutex_);
  const size_t left = staging_bytes - std::min(staging_bytes, staging_used_);
  size_t chunk = Segment::kMaxChunkBytes;
  while (chunk > Segment::kMinChunkBytes && 6 * Segment::staging_bytes(size, chunk) > left) {
    chunk /= 2;
  }
  return chunk;
}

void Fabric::attach(ShmConnection* connection, const std::vector<PeerInfo>& peers) {
  std::lock_guard lock(mutex_);
  if (!watchdog_) {
    watchdog_ = std::make_unique<Watchdog>(
        [this](const std::string& process) { on_death(process); }, [this] { beat(); });
  }
  Segment* const segment = connection->segment.get();
  groups_[segment] = {peers, connection->pools, std::move(connection->own_pool), {}};
  staging_used_ += Segment::staging_bytes(segment->size(), segment->max_chunk_bytes());
  for (size_t rank = 0; rank < peers.size(); ++rank) {
    if (sees_same_processes(peers[rank])) {
      FlightRecord::instance().note_peer(segment->global_rank(static_cast<int>(rank)),
                                         peers[rank].pid);
    }
    if (peers[rank].process == self_.process) continue;
    watchdog_->watch(peers[rank].process, std::move(connection->pidfds[rank]), peers[rank].mark);
  }
  connection->pidfds.clear();
}

void Fabric::detach(Segment* segment) {
  if (forked()) return;
  std::unique_ptr<Watchdog> ending;  // behind the lock, which its thread may be waiting for
  std::lock_guard lock(mutex_);
  const auto gone = groups_.extract(segment);
  if (gone.empty()) return;
  staging_used_ -= Segment::staging_bytes(segment->size(), segment->max_chunk_bytes());
  for (const PeerInfo& peer : gone.mapped().peers) {
    const bool still_shared = std::any_of(groups_.begin(), groups_.end(), [&](const auto& group) {
      const std::vector<PeerInfo>& peers = group.second.peers;
      return std::any_of(peers.begin(), peers.end(), [&](const PeerInfo& other) {
        return other.process == peer.process;
      });
    });
    if (!still_shared) watchdog_->forget(peer.process);
  }
  if (groups_.empty()) ending = std::move(watchdog_);
}

void Fabric::on_tick(Segment* segment, std::function<void()> tick) {
  std::lock_guard lock(mutex_);
  const auto found = groups_.find(segment);
  if (found != groups_.end()) found->second.tick = std::move(tick);
}

void Fabric::on_death(const std::string& process) {
  std::lock_guard lock(mutex_);
  for (const auto& [segment, group] : groups_) {
    const std::vector<PeerInfo>& peers = group.peers;
    for (size_t rank = 0; rank < peers.size(); ++rank) {
      if (peers[rank].process != process || segment->has_left(static_cast<int>(rank))) continue;
      segment->abort(DPT_ERR_PEER_LOST,
                     "rank " + std::to_string(segment->global_rank(static_cast<int>(rank))) +
                         " (pid " + std::to_string(peers[rank].pid) + ") died");
    }
    if (group.tick) group.tick();
  }
}

void Fabric::beat() {
  std::lock_guard lock(mutex_);
  for (const auto& [segment, group] : groups_) {
    segment->beat();
    if (group.tick) group.tick();
  }
}

int Fabric::cores_together(const std::vector<PeerInfo>& peers) const {
  std::vector<uint64_t> together;
  for (const PeerInfo& peer : peers) {
    if (together.size() < peer.affinity.size()) together.resize(peer.affinity.size());
    for (size_t i = 0; i < peer.affinity.size(); ++i) together[i] |= peer.affinity[i];
  }
  int cores = count_cores(together);
  // A quota (containers) caps a process below its affinity, and its neighbours share the quota.
  if (self_.usable_cores < count_cores(self_.affinity)) cores = std::min(cores, self_.usable_cores);
  return cores;
}

}  // namespace dpt
