#include "transport/shm/chunk_pool.hpp"

#include <algorithm>
#include <string>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/types.hpp"

namespace dpt {

bool FreeRanges::take(size_t bytes, uint64_t* offset) {
  for (auto each = free_.begin(); each != free_.end(); ++each) {
    const auto [begin, available] = *each;
    if (available < bytes) continue;
    free_.erase(each);
    if (available > bytes) free_.emplace(begin + bytes, available - bytes);
    *offset = begin;
    return true;
  }
  return false;
}

void FreeRanges::give_back(uint64_t offset, size_t bytes) {
  auto after = free_.lower_bound(offset);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      free_.erase(before);
    }
  }
  if (after != free_.end() && offset + bytes == after->first) {
    bytes += after->second;
    free_.erase(after);
  }
  free_.emplace(offset, bytes);
}

ChunkPool::ChunkPool(ChunkMemory* memory, const Shape& shape)
    : memory_(memory), shape_(shape), ranges_(shape.capacity), devices_{shape.device} {}

ChunkPool::~ChunkPool() {
  if (base() == nullptr) return;
  for (const auto& [offset, chunk] : chunks_) {
    if (chunk.freed) continue;
    memory_->unmap(base() + offset, chunk.bytes);
    memory_->release(chunk.handle);
  }
  memory_->unreserve(base(), shape_.capacity);
}

char* ChunkPool::prepare() {
  std::lock_guard lock(mutex_);
  if (base() == nullptr) {
    base_.store(memory_->reserve(shape_.capacity), std::memory_order_release);
  }
  return base();
}

char* ChunkPool::allocate(size_t bytes) {
  if (forked_.load(std::memory_order_relaxed)) return nullptr;
  char* const base = prepare();
  if (bytes > shape_.capacity) return nullptr;
  bytes = round_up(std::max<size_t>(bytes, 1), shape_.granularity);
  std::lock_guard lock(mutex_);
  uint64_t offset = 0;
  if (!ranges_.take(bytes, &offset)) return nullptr;
  uint64_t handle = 0;
  try {
    handle = memory_->create(shape_.device, bytes);
    if (handle == 0) {
      ranges_.give_back(offset, bytes);
      return nullptr;
    }
    memory_->map(base + offset, bytes, handle, devices_);
  } catch (...) {
    if (handle != 0) memory_->release(handle);
    ranges_.give_back(offset, bytes);
    throw;
  }
  const auto made = chunks_.emplace(offset, Chunk{next_id_++, bytes, handle}).first;
  offer(*made, links_);
  publish();
  return base + offset;
}

void ChunkPool::offer(Chunks::value_type& entry,
                      const std::vector<std::shared_ptr<PoolLink>>& links) {
  if (links.empty()) return;
  auto& [offset, chunk] = entry;
  std::shared_ptr<const UniqueFd> file;
  try {
    file = std::make_shared<const UniqueFd>(memory_->export_file(chunk.handle));
  } catch (const Error& error) {
    static std::atomic<bool> told{false};
    if (!told.exchange(true))
      log(LogLevel::kWarning,
          std::string("registered device memory is not shared, so collectives treat it as ordinary "
                      "memory: ") +
              error.what());
  }
  for (const auto& link : links) {
    chunk.links[link.get()] = file ? State::kOffered : State::kRefused;
    if (file) {
      link->post({ChunkMessage::kOffer, shape_.device, chunk.id, offset, chunk.bytes}, file);
    }
  }
}

void ChunkPool::free(char* address) noexcept {
  // Nor is a lock looked at there: a thread that held it may be the parent's.
  if (forked_.load(std::memory_order_relaxed) || base() == nullptr) return;
  // Peers' kernels write here only while one of ours takes part, so this waits for them as well.
  memory_->synchronize(shape_.device);
  std::unique_lock lock(mutex_);
  const uint64_t offset = address - base();
  const auto found = chunks_.find(offset);
  if (found == chunks_.end() || found->second.freed) return;
  Chunk& chunk = found->second;
  const uint64_t id = chunk.id;
  chunk.freed = true;
  publish();
  memory_->unmap(address, chunk.bytes);
  memory_->release(chunk.handle);
  for (const auto& link : links_) {
    if (chunk.links.count(link.get()) == 0) continue;
    link->post({ChunkMessage::kDrop, shape_.device, id, offset, chunk.bytes});
  }
  if (chunk.links.empty()) return retire(found);
  if (answered_.wait_for(lock, shape_.grace, [&] { return !is_awaited(offset, id); })) return;
  const auto left = chunks_.find(offset);
  for (const auto& link : links_) {
    if (left->second.links.count(link.get()) != 0) link->set_late(true);
  }
}

bool ChunkPool::is_awaited(uint64_t offset, uint64_t id) const {
  const auto found = chunks_.find(offset);
  if (found == chunks_.end() || found->second.id != id) return false;
  return std::any_of(links_.begin(), links_.end(), [&](const auto& link) {
    return found->second.links.count(link.get()) != 0 && !link->is_late();
  });
}

void ChunkPool::retire(Chunks::iterator chunk) {
  ranges_.give_back(chunk->first, chunk->second.bytes);
  chunks_.erase(chunk);
  answered_.notify_all();
}

void ChunkPool::allow(int device) {
  std::lock_guard lock(mutex_);
  if (std::find(devices_.begin(), devices_.end(), device) != devices_.end()) return;
  devices_.push_back(device);
  try {
    for (const auto& [offset, chunk] : chunks_) {
      if (!chunk.freed) memory_->allow(base() + offset, chunk.bytes, devices_);
    }
  } catch (...) {
    devices_.pop_back();
    throw;
  }
}

bool ChunkPool::is_shared(const void* address, size_t bytes) const {
  // As numbers: `address` may point anywhere.
  const auto begin = reinterpret_cast<uintptr_t>(base());
  const auto place = reinterpret_cast<uintptr_t>(address);
  if (begin == 0 || place < begin || place - begin >= shape_.capacity) return false;
  if (forked_.load(std::memory_order_relaxed)) return false;
  const uint64_t offset = place - begin;
  std::lock_guard lock(shared_mutex_);
  const auto after = std::upper_bound(
      shared_.begin(), shared_.end(), offset, [](uint64_t value, const auto& interval) {
        return value < interval.first;
      });
  if (after == shared_.begin()) return false;
  const uint64_t end = std::prev(after)->second;
  return offset < end && bytes <= end - offset;
}

ChunkPool::Usage ChunkPool::usage() const {
  Usage usage{0, 0};
  std::lock_guard lock(mutex_);
  for (const auto& [offset, chunk] : chunks_) {
    if (!chunk.freed) usage.chunk_bytes += chunk.bytes;
  }
  std::lock_guard shared_lock(shared_mutex_);
  for (const auto& [begin, end] : shared_) usage.shared_bytes += end - begin;
  return usage;
}

void ChunkPool::publish() {
  std::vector<std::pair<uint64_t, uint64_t>> shared;
  for (const auto& [offset, chunk] : chunks_) {
    const bool everywhere =
        !chunk.freed && std::all_of(chunk.links.begin(), chunk.links.end(), [](const auto& link) {
          return link.second == State::kMapped;
        });
    if (!everywhere) continue;
    if (!shared.empty() && shared.back().second == offset) {
      shared.back().second += chunk.bytes;
    } else {
      shared.emplace_back(offset, offset + chunk.bytes);
    }
  }
  std::lock_guard lock(shared_mutex_);
  shared_ = std::move(shared);
}

void ChunkPool::subscribe(const std::shared_ptr<PoolLink>& link) {
  std::lock_guard lock(mutex_);
  if (std::find(links_.begin(), links_.end(), link) != links_.end()) return;
  links_.push_back(link);
  for (auto& entry : chunks_) {
    if (!entry.second.freed) offer(entry, {link});
  }
  publish();
}

void ChunkPool::unsubscribe(const PoolLink* link) {
  std::lock_guard lock(mutex_);
  std::erase_if(links_, [&](const auto& each) { return each.get() == link; });
  for (auto each = chunks_.begin(); each != chunks_.end();) {
    const auto chunk = each++;
    chunk->second.links.erase(link);
    if (chunk->second.freed && chunk->second.links.empty()) retire(chunk);
  }
  publish();
  answered_.notify_all();
}

void ChunkPool::answer(PoolLink* link, const ChunkMessage& message) {
  std::lock_guard lock(mutex_);
  link->set_late(false);
  const auto found = chunks_.find(message.offset);
  if (found == chunks_.end() || found->second.id != message.id) return;
  Chunk& chunk = found->second;
  const auto state = chunk.links.find(link);
  if (state == chunk.links.end()) return;
  switch (message.kind) {
    case ChunkMessage::kMapped:
    case ChunkMessage::kRefused:
      state->second = message.kind == ChunkMessage::kMapped ? State::kMapped : State::kRefused;
      return publish();
    case ChunkMessage::kDropped:
      if (!chunk.freed) return;
      chunk.links.erase(state);
      if (chunk.links.empty()) retire(found);
      answered_.notify_all();
      return;
    default:
      return;
  }
}

}  // namespace dpt
