// Parts of a snapshot on hosts that do not see the chief's folder: on each of them one writer leads the others, and
// leaves word of them in the store that the job's workers met through, since training goes on over the job's
// connections meanwhile.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "checkpoint/awaited_part.h"
#include "checkpoint/draft.h"
#include "net/rendezvous.h"

namespace muster::checkpoint {

/// This host's name (is_host_name).
std::string host_name();

/// A client of the same store that another thread may use. Throws CheckpointError where the store has none.
net::StorePtr client_for_thread(const net::StorePtr& store);

/// What the writer that leads a host says of the parts there; nobody else in the store has its name. A value. Its
/// functions throw CheckpointError where the store is gone, and where it does not answer who tells of parts, or of a
/// failure, within `patience`: that of a host that stands still never does.
class WordOfHost {
 public:
  static constexpr std::chrono::milliseconds kPatience{30'000};

  WordOfHost(net::StorePtr store, std::string leader, std::chrono::milliseconds patience = kPatience);

  /// The bytes that the host's writers have written.
  void tell_progress(uint64_t bytes) const;
  /// That the parts of which these are the manifests, by writer, are on this host's disk, in the place that they have
  /// in the snapshot. Takes that back where the chief has given up.
  void tell_parts(std::map<std::string, std::string> manifests) const;
  /// Why there will be none. Likewise.
  void tell_failure(const std::string& reason) const;

  /// As the chief waits for it: takes the parts into `draft`, and notes their host in `hosts`, by writer, once they are
  /// there. Both outlive what is returned.
  AwaitedPart awaited(const std::filesystem::path& draft, std::map<std::string, std::string>& hosts) const;
  /// Removes what was told, where the store can.
  void forget() const noexcept;
  /// What the chief does instead where there will be no snapshot: what is told later is removed by who tells it.
  void give_up() const noexcept;

 private:
  std::string key(const std::string& what) const { return "muster/checkpoints/" + leader_ + '/' + what; }
  void tell(const std::string& what, const std::string& text) const;
  std::string asked(const std::string& what) const;  // empty where nothing was told
  void forget_where_given_up() const;
  void set_parts(const std::map<std::string, std::string>& manifests) const;
  template <class Call>
  void in_time(Call call) const;
  void take(const std::string& told, const std::filesystem::path& draft,
            std::map<std::string, std::string>& hosts) const;

  net::StorePtr store_;
  std::string leader_;
  std::chrono::milliseconds patience_;
};

/// Tells a host's progress while it lives, on a thread of its own: what `bytes` gives. Throws CheckpointError where no
/// thread can be made.
class ProgressTeller {
 public:
  ProgressTeller(WordOfHost word, std::function<uint64_t()> bytes);
  ~ProgressTeller();
  ProgressTeller(const ProgressTeller&) = delete;
  ProgressTeller& operator=(const ProgressTeller&) = delete;

 private:
  void run() noexcept;

  const WordOfHost word_;
  const std::function<uint64_t()> bytes_;
  std::mutex mutex_;
  std::condition_variable ends_;
  bool is_over_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace muster::checkpoint
