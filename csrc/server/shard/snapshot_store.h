// Where a server keeps its snapshots.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/snapshot.h"

namespace muster::server {

/// Used by one thread at a time. Every function throws CheckpointError where the system refuses.
class SnapshotStore {
 public:
  SnapshotStore() = default;
  virtual ~SnapshotStore() = default;
  SnapshotStore(const SnapshotStore&) = delete;
  SnapshotStore& operator=(const SnapshotStore&) = delete;

  /// Greater than that of any server that used the store before.
  virtual uint64_t life() const = 0;

  struct Entry {
    std::string name;
    checkpoint::Metadata metadata;
  };
  /// In the order in which they were written. Those whose metadata are damaged are left out.
  virtual std::vector<Entry> list() const = 0;
  /// Gives its tensors as they were written, some at a time, each time with the bytes that were read before, of how
  /// many. Throws CheckpointError for one that is damaged: what was given before is then not to be used.
  using Give = std::function<void(const checkpoint::NamedTensors& tensors, uint64_t done, uint64_t total)>;
  virtual void read(const std::string& name, const Give& give) const = 0;
  /// Blocks until it is durable; returns its name. See checkpoint::write_snapshot.
  virtual std::string write(const checkpoint::Metadata& metadata, const checkpoint::NextTensors& next,
                            const checkpoint::SnapshotOptions& options) = 0;
  virtual void remove(const std::string& name) = 0;

  /// For messages.
  virtual std::string where() const = 0;
};

/// A folder, which it claims. Throws CheckpointError where another process uses it.
std::unique_ptr<SnapshotStore> open_snapshot_folder(const std::filesystem::path& folder);

}  // namespace muster::server
