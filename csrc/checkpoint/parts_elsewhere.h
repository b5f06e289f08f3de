// Parts of a snapshot on hosts that do not see the chief's folder: their writers leave word of them in the store that
// the job's workers met through, since training goes on over the job's connections meanwhile.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/awaited_part.h"
#include "checkpoint/draft.h"
#include "net/rendezvous.h"

namespace muster::checkpoint {

/// This host's name. Not empty.
std::string host_name();

/// What one writer, whose name nobody else has in the store, says of its part. A value. Its functions throw
/// CheckpointError where the store is gone.
class WordOfPart {
 public:
  WordOfPart(net::StorePtr store, std::string writer);

  /// The number of runs that it has come to.
  void tell_progress(uint64_t runs) const;
  /// That its part, of which this is the manifest, is on this host's disk, in the place that it has in the snapshot.
  void tell_part(const std::string& manifest) const;
  /// Why there will be none.
  void tell_failure(const std::string& reason) const;

  /// As the chief waits for it: takes the part into `draft`, and notes its host in `hosts`, by writer, once it is
  /// there. Both outlive what is returned.
  AwaitedPart awaited(const std::filesystem::path& draft, std::map<std::string, std::string>& hosts) const;
  /// Removes what was told, where the store can.
  void forget() const noexcept;

 private:
  std::string key(const std::string& what) const { return "muster/checkpoints/" + writer_ + '/' + what; }
  void tell(const std::string& what, const std::string& text) const;
  std::string asked(const std::string& what) const;  // empty where nothing was told

  net::StorePtr store_;
  std::string writer_;
};

}  // namespace muster::checkpoint
