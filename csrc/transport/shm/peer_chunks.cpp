#include "transport/shm/peer_chunks.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace dpt {

PeerRange::PeerRange(ChunkMemory* memory, size_t bytes)
    : memory_(memory), bytes_(bytes), base_(memory->reserve(bytes)) {}

PeerRange::~PeerRange() {
  for (const auto& [id, chunk] : chunks_) memory_->unmap(base_ + chunk.offset, chunk.bytes);
  memory_->unreserve(base_, bytes_);
}

void PeerRange::allow(int device) {
  std::lock_guard lock(mutex_);
  if (std::find(devices_.begin(), devices_.end(), device) != devices_.end()) return;
  devices_.push_back(device);
  try {
    for (const auto& [id, chunk] : chunks_) {
      memory_->allow(base_ + chunk.offset, chunk.bytes, devices_);
    }
  } catch (...) {
    devices_.pop_back();
    throw;
  }
}

void PeerRange::map(const ChunkMessage& offer, const UniqueFd& file) {
  std::lock_guard lock(mutex_);
  if (const auto found = chunks_.find(offer.id); found != chunks_.end()) {
    ++found->second.links;
    return;
  }
  if (file.get() < 0 || devices_.empty()) {
    throw Error(DPT_ERR_SYSTEM, "no file descriptor came along: raise `ulimit -n`");
  }
  const bool fits =
      offer.bytes != 0 && offer.bytes <= bytes_ && offer.offset <= bytes_ - offer.bytes;
  const bool overlaps = std::any_of(chunks_.begin(), chunks_.end(), [&](const auto& each) {
    const Mapped& chunk = each.second;
    return offer.offset < chunk.offset + chunk.bytes && chunk.offset < offer.offset + offer.bytes;
  });
  if (!fits || overlaps) throw Error(DPT_ERR_SYSTEM, "a peer's chunk has no place in its range");
  const uint64_t handle = memory_->import_file(devices_.front(), file);
  try {
    memory_->map(base_ + offer.offset, offer.bytes, handle, devices_);
  } catch (...) {
    memory_->release(handle);
    throw;
  }
  memory_->release(handle);  // the mapping keeps it
  chunks_[offer.id] = {offer.offset, offer.bytes, 1};
}

void PeerRange::drop(uint64_t id) noexcept {
  std::lock_guard lock(mutex_);
  const auto found = chunks_.find(id);
  if (found == chunks_.end() || --found->second.links > 0) return;
  memory_->unmap(base_ + found->second.offset, found->second.bytes);
  chunks_.erase(found);
}

size_t PeerRange::mapped_bytes() const {
  std::lock_guard lock(mutex_);
  size_t bytes = 0;
  for (const auto& [id, chunk] : chunks_) bytes += chunk.bytes;
  return bytes;
}

std::shared_ptr<PeerRange> PeerRanges::open(const std::string& process, int device, size_t bytes) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<PeerRange>& range = ranges_[{process, device}];
  if (!range) range = std::make_shared<PeerRange>(memory_, bytes);
  return range;
}

std::shared_ptr<PeerRange> PeerRanges::find(const std::string& process, int device) const {
  std::lock_guard lock(mutex_);
  const auto found = ranges_.find({process, device});
  return found == ranges_.end() ? nullptr : found->second;
}

void PeerRanges::forget(const std::string& process) {
  std::lock_guard lock(mutex_);
  std::erase_if(ranges_, [&](const auto& each) { return each.first.first == process; });
}

}  // namespace dpt
