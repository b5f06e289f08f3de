// What a rank's thread does of a snapshot that ranks write together (joint_snapshot.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/awaited_part.h"
#include "checkpoint/draft.h"
#include "net/rendezvous.h"

namespace muster::checkpoint {

/// Writes one rank's part. A value.
struct PartTask {
  std::filesystem::path draft;
  std::string writer;
  std::vector<Run> runs;
  SnapshotOptions options;
  std::shared_ptr<const PartLock> lock;
  std::vector<AwaitedPart> others = {};     // who write to the same draft
  Metadata labels = {};                     // of a part on another host than the chief's
  net::StorePtr store = {};                 // of who leads such a host, and of the chief where there are some
  std::vector<std::string> leaders = {};    // of these, as the chief knows them
  std::vector<std::string> elsewhere = {};  // all who write there
  int64_t oldest = 0;                       // the first number that such a host keeps
  std::string lineage = {};

  /// That of who waits for nobody.
  void write() const;
  /// The chief's. Returns the snapshot's folder.
  std::filesystem::path write_and_finish(const Metadata& metadata, std::chrono::milliseconds patience) const;
  /// That of who leads a host: it tells the chief of all parts there, and then removes what need not stay.
  void write_and_place(std::chrono::milliseconds patience) const;
  /// Why there will be no parts of a host, by who leads it.
  void tell_failure(const std::string& reason) const noexcept;

 private:
  std::vector<std::string> writers() const;
  std::map<std::string, std::string> write_placed(std::chrono::milliseconds patience) const;
};

}  // namespace muster::checkpoint
