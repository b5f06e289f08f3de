#include "server/worker/push_log.h"

#include <algorithm>
#include <new>
#include <utility>

#include "kernels/cpu/stream_copy.h"

namespace muster::server {

namespace {

constexpr uint64_t kPage = net::Arena::kPage;
constexpr size_t kAlways = 2;  // entries that are never refused
constexpr uint64_t kBlock = uint64_t{64} << 10;

uint64_t round_up(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

uint64_t PushLog::slab_bytes(const std::vector<Chunk>& chunks) {
  uint64_t bytes = 0;
  for (const auto& chunk : chunks) bytes += round_up(static_cast<uint64_t>(chunk.gradient_bytes()), kPayloadAlignment);
  return std::max(round_up(bytes, kPage), kPage);
}

size_t PushLog::slabs_of(const std::vector<Chunk>& chunks, uint64_t max_bytes) {
  return std::max<uint64_t>(kAlways, max_bytes / slab_bytes(chunks));
}

uint64_t PushLog::memory_needed(const std::vector<Chunk>& chunks, uint64_t max_bytes) {
  return 2 * slab_bytes(chunks) * slabs_of(chunks, max_bytes);
}

PushLog::PushLog(const std::vector<Chunk>& chunks, std::shared_ptr<net::Arena> memory, uint64_t max_bytes)
    : memory_(std::move(memory)),
      capacity_(slabs_of(chunks, max_bytes)),
      slab_bytes_(slab_bytes(chunks)),
      max_bytes_(std::max(max_bytes, kAlways * slab_bytes_)) {
  uint64_t offset = 0;
  for (const auto& chunk : chunks) {
    offsets_.push_back(offset);
    sizes_.push_back(static_cast<uint64_t>(chunk.gradient_bytes()));
    offset += round_up(sizes_.back(), kPayloadAlignment);
  }
}

PushLog::~PushLog() {
  for (std::byte* slab : slabs_) free({slab, slab_bytes_});
  for (const auto& entry : entries_) {
    for (const auto& block : entry.blocks) free(block);
  }
  for (const auto& block : spare_) free(block);
}

std::byte* PushLog::allocate(uint64_t bytes) {
  return memory_ ? memory_->allocate(bytes)
                 : static_cast<std::byte*>(::operator new(bytes, std::align_val_t(kPayloadAlignment)));
}

void PushLog::free(const Block& block) noexcept {
  if (memory_) {
    memory_->release(block.data);
  } else {
    ::operator delete(block.data, std::align_val_t(kPayloadAlignment));
  }
}

bool PushLog::fits(uint64_t more) const noexcept {
  return entries_.size() * slab_bytes_ + blocks_bytes_ + more <= max_bytes_;
}

bool PushLog::is_half_full() const noexcept {
  const uint64_t used = entries_.size() * slab_bytes_ + blocks_bytes_;
  return 2 * entries_.size() >= capacity_ || 2 * used >= max_bytes_;
}

bool PushLog::is_full() const noexcept {
  if (entries_.size() < kAlways) return false;
  if (free_.empty() && slabs_.size() >= capacity_) return true;
  uint64_t bytes = slab_bytes_;
  for (const auto& block : entries_.back().blocks) bytes += block.bytes;
  return !fits(bytes);
}

std::byte* PushLog::room(Entry& entry, uint64_t bytes, bool beyond_bound) {
  bytes = round_up(bytes, kPayloadAlignment);
  if (entry.block_left < bytes) {
    const uint64_t size = round_up(bytes, kBlock);
    if (!beyond_bound && entries_.size() > kAlways && !fits(size)) return nullptr;
    Block block;
    const auto found = std::find_if(spare_.begin(), spare_.end(), [&](const Block& b) { return b.bytes == size; });
    if (found != spare_.end()) {
      block = *found;
      spare_bytes_ -= size;
      *found = spare_.back();
      spare_.pop_back();
    } else {
      // Sizes change: spare blocks of others make room.
      while (!spare_.empty() && !fits(spare_bytes_ + size)) {
        spare_bytes_ -= spare_.back().bytes;
        free(spare_.back());
        spare_.pop_back();
      }
      block = {allocate(size), size};
    }
    entry.blocks.push_back(block);
    entry.block_left = size;
    blocks_bytes_ += size;
  }
  const auto& block = entry.blocks.back();
  std::byte* const place = block.data + (block.bytes - entry.block_left);
  entry.block_left -= bytes;
  return place;
}

PushLog::Entry* PushLog::open(uint64_t step, bool beyond_bound) {
  if (!entries_.empty() && entries_.back().step == step) return &entries_.back();
  if (!beyond_bound && entries_.size() >= kAlways && !fits(slab_bytes_)) return nullptr;
  if (free_.empty()) {
    if (!beyond_bound && slabs_.size() >= capacity_) return nullptr;
    slabs_.push_back(allocate(slab_bytes_));
    free_.push_back(slabs_.back());
  }
  auto& entry = entries_.emplace_back();
  entry.step = newest_ = step;
  entry.slab = free_.back();
  free_.pop_back();
  entry.pushed.resize(sizes_.size());
  return &entry;
}

PushLog::Entry* PushLog::find(uint64_t step) {
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.step == step; });
  return found == entries_.end() ? nullptr : &*found;
}

void PushLog::check_size(uint32_t chunk, std::span<const Bytes> pieces) const {
  uint64_t bytes = 0;
  for (const Bytes& piece : pieces) bytes += piece.size();
  if (bytes == sizes_[chunk]) return;
  throw InvalidArgument("a push of chunk " + std::to_string(chunk) + " has " + std::to_string(bytes) + " bytes, not " +
                        std::to_string(sizes_[chunk]));
}

void PushLog::write(Entry& entry, uint32_t chunk, std::span<const Bytes> pieces) const {
  check_size(chunk, pieces);
  const auto copy = kernels::copy_for(slab_bytes_);
  std::byte* to = entry.slab + offsets_[chunk];
  for (const Bytes& piece : pieces) {
    copy(to, piece.data(), piece.size());
    to += piece.size();
  }
  entry.pushed[chunk] = true;
}

void PushLog::lend(Entry& entry, uint32_t chunk, std::span<const Bytes> pieces,
                   std::shared_ptr<const void> owner) const {
  check_size(chunk, pieces);
  entry.lent.push_back({chunk, {pieces.begin(), pieces.end()}, std::move(owner)});
  entry.pushed[chunk] = true;
}

void PushLog::take_lent() {
  for (auto& entry : entries_) {
    for (const auto& lent : entry.lent) write(entry, lent.chunk, lent.pieces);
    entry.lent.clear();
  }
}

Bytes PushLog::of_chunk(const Entry& entry, uint32_t chunk) const {
  return {entry.slab + offsets_[chunk], sizes_[chunk]};
}

void PushLog::release(uint64_t step) {
  while (!entries_.empty() && entries_.front().step <= step) {
    std::byte* const slab = entries_.front().slab;
    if (slabs_.size() > capacity_) {
      std::erase(slabs_, slab);
      free({slab, slab_bytes_});
    } else {
      free_.push_back(slab);
    }
    for (const auto& block : entries_.front().blocks) {
      blocks_bytes_ -= block.bytes;
      spare_bytes_ += block.bytes;
      spare_.push_back(block);
    }
    entries_.pop_front();
  }
}

}  // namespace muster::server
