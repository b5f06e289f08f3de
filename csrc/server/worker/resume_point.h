// Where a synchronous job goes on that begins after another one on the same servers. Logic alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/protocol/protocol.h"

namespace muster::server {

class ResumePoint {
 public:
  /// What each server holds; `servers` must outlive it.
  explicit ResumePoint(const std::vector<Configured>& servers) : servers_(servers) {}

  /// The newest step that was begun, where no server is more than that one behind: with its command it may be made
  /// everywhere.
  std::optional<Resume> newest() const;
  /// The greatest step that every server has made and no more, or has a snapshot of.
  std::optional<uint64_t> common() const;
  /// What a server could go on from.
  std::string in_words(size_t server) const;

 private:
  const std::vector<Configured>& servers_;
};

}  // namespace muster::server
