// Memory of a worker whose contents servers read and write, where they share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "net/shared_segment.h"

namespace muster::server {

/// Externally synchronised.
class ClientMemory {
 public:
  /// In `arena`, or in the heap where that is null and payloads travel.
  explicit ClientMemory(std::shared_ptr<net::Arena> arena) : arena_(std::move(arena)) {}

  const std::shared_ptr<net::Arena>& arena() const noexcept { return arena_; }
  bool is_shared() const noexcept { return arena_ != nullptr; }

  /// 64-byte aligned; lives as long as this.
  std::byte* allocate(uint64_t bytes);
  /// Where servers find `memory`; nothing where they do not see it.
  std::optional<uint64_t> place_of(std::span<const std::byte> memory) const noexcept;

 private:
  const std::shared_ptr<net::Arena> arena_;
  std::vector<std::unique_ptr<std::byte[]>> heap_;
};

}  // namespace muster::server
