// A server's snapshots in memory, which outlive it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "muster/error.h"
#include "server/shard/snapshot_store.h"

namespace muster::testing {

struct SimulatedDisk {
  struct Kept {
    std::string name;
    checkpoint::Metadata metadata;
    std::vector<checkpoint::NamedTensors> tensors;
    bool is_damaged = false;
  };
  std::vector<Kept> kept;
  uint64_t lives = 0;
  uint64_t names = 0;
};

/// A life's of a server.
class DiskStore final : public server::SnapshotStore {
 public:
  /// `on_write` is called when a snapshot is begun, and when it is there (true); what it throws ends the write there.
  using OnWrite = std::function<void(bool is_there)>;

  DiskStore(SimulatedDisk& disk, OnWrite on_write) : disk_(disk), life_(++disk.lives), on_write_(std::move(on_write)) {}

  uint64_t life() const override { return life_; }
  std::vector<Entry> list() const override {
    std::vector<Entry> entries;
    for (const auto& kept : disk_.kept) entries.push_back({kept.name, kept.metadata});
    return entries;
  }
  void read(const std::string& name, const Give& give) const override {
    for (const auto& kept : disk_.kept) {
      if (kept.name != name) continue;
      for (const auto& tensors : kept.tensors) give(tensors, 0, 1);
      if (kept.is_damaged) throw CheckpointError("damaged");
      return;
    }
    throw CheckpointError("not there");
  }
  std::string write(const checkpoint::Metadata& metadata, const checkpoint::NextTensors& next,
                    const checkpoint::SnapshotOptions& /*options*/) override {
    on_write_(false);
    SimulatedDisk::Kept kept{std::to_string(++disk_.names), metadata, {}};
    for (auto tensors = next(); !tensors.empty(); tensors = next()) kept.tensors.push_back(std::move(tensors));
    disk_.kept.push_back(std::move(kept));
    on_write_(true);
    return disk_.kept.back().name;
  }
  void remove(const std::string& name) override {
    std::erase_if(disk_.kept, [&](const auto& kept) { return kept.name == name; });
  }
  std::string where() const override { return "a disk"; }

 private:
  SimulatedDisk& disk_;
  const uint64_t life_;
  const OnWrite on_write_;
};

}  // namespace muster::testing
