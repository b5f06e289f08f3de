#include "server/push_log.h"

#include <algorithm>
#include <utility>

namespace muster::server {

namespace {

constexpr uint64_t kPage = net::Arena::kPage;
constexpr uint64_t kAlignment = 64;

uint64_t round_up(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

uint64_t PushLog::slab_bytes(const std::vector<Chunk>& chunks) {
  uint64_t bytes = 0;
  for (const auto& chunk : chunks) bytes += round_up(static_cast<uint64_t>(chunk.gradient_bytes()), kAlignment);
  return std::max(round_up(bytes, kPage), kPage);
}

size_t PushLog::slabs_of(const std::vector<Chunk>& chunks, uint64_t max_bytes) {
  return std::max<uint64_t>(2, max_bytes / slab_bytes(chunks));
}

uint64_t PushLog::memory_needed(const std::vector<Chunk>& chunks, uint64_t max_bytes) {
  return slab_bytes(chunks) * slabs_of(chunks, max_bytes);
}

PushLog::PushLog(const std::vector<Chunk>& chunks, std::shared_ptr<net::Arena> memory, uint64_t max_bytes)
    : memory_(std::move(memory)), capacity_(slabs_of(chunks, max_bytes)), slab_bytes_(slab_bytes(chunks)) {
  uint64_t offset = 0;
  for (const auto& chunk : chunks) {
    offsets_.push_back(offset);
    sizes_.push_back(static_cast<uint64_t>(chunk.gradient_bytes()));
    offset += round_up(sizes_.back(), kAlignment);
  }
}

PushLog::~PushLog() {
  if (!memory_) return;
  for (std::byte* slab : slabs_) memory_->release(slab);
}

PushLog::Entry* PushLog::open(uint64_t step) {
  if (!entries_.empty() && entries_.back().step == step) return &entries_.back();
  if (free_.empty()) {
    if (slabs_.size() == capacity_) return nullptr;
    if (memory_) {
      slabs_.push_back(memory_->allocate(slab_bytes_));
    } else {
      heap_.emplace_back(new std::byte[slab_bytes_]);
      slabs_.push_back(heap_.back().get());
    }
    free_.push_back(slabs_.back());
  }
  auto& entry = entries_.emplace_back();
  entry.step = step;
  entry.slab = free_.back();
  free_.pop_back();
  entry.pushed.resize(sizes_.size());
  return &entry;
}

PushLog::Entry* PushLog::find(uint64_t step) {
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.step == step; });
  return found == entries_.end() ? nullptr : &*found;
}

std::span<std::byte> PushLog::of_chunk(const Entry& entry, uint32_t chunk) const {
  return {entry.slab + offsets_[chunk], sizes_[chunk]};
}

void PushLog::release(uint64_t step) {
  while (!entries_.empty() && entries_.front().step <= step) {
    free_.push_back(entries_.front().slab);
    entries_.pop_front();
  }
}

}  // namespace muster::server
