#include "server/worker/client_memory.h"

#include <cstdint>

#include "server/worker/push_log.h"

namespace muster::server {

std::byte* ClientMemory::allocate(uint64_t bytes) {
  if (arena_) return arena_->allocate(bytes);
  heap_.emplace_back(new std::byte[bytes + kPayloadAlignment]);
  const auto address = reinterpret_cast<uintptr_t>(heap_.back().get());
  return heap_.back().get() + (kPayloadAlignment - address % kPayloadAlignment) % kPayloadAlignment;
}

std::optional<uint64_t> ClientMemory::place_of(std::span<const std::byte> memory) const noexcept {
  const auto base = reinterpret_cast<uintptr_t>(arena_ ? arena_->data() : nullptr);
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  if (!arena_ || at < base || at - base > arena_->capacity() - memory.size()) return std::nullopt;
  return at - base;
}

}  // namespace muster::server
