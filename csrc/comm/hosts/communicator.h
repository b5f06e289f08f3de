// Communicators over the replicas of several hosts: the memory of each host, and process groups between them.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "comm/c10d/communicator.h"
#include "comm/communicator.h"
#include "comm/hosts/layout.h"
#include "muster/error.h"

namespace muster::comm {

/// Word of workers that are lost, among hosts: the ones beside a worker know that it ended, the others only that
/// something did, or that nothing comes. Thread-safe.
class LostWorkers {
 public:
  virtual ~LostWorkers() = default;
  virtual void tell(const PeerLost& lost) noexcept = 0;
  /// What was told first, waiting so long for it; what this worker told itself, at once.
  virtual std::optional<PeerLost> ask(Milliseconds patience) noexcept = 0;
  /// Whether ask() has an answer at once.
  virtual bool knows() const noexcept = 0;

  /// Around each wait for other workers, by any thread: signs of life are looked for while one lasts.
  virtual void begin_wait() noexcept = 0;
  virtual void end_wait() noexcept = 0;
  /// In a wait that took its timeout: the workers that gave no sign of life during the last part of it.
  virtual std::optional<PeerLost> find_silent() noexcept = 0;
  /// After a connection ended: the workers that have given no sign of life since, waiting some seconds for that.
  virtual std::optional<PeerLost> find_ended() noexcept = 0;
  /// This worker ends its part in good order, once. Waits up to two seconds for the others to know.
  virtual void leave() noexcept = 0;
};

/// What replicas of one worker communicate through. Process groups are over all workers, serve CPU tensors, know
/// all-to-all with sizes that differ (Gloo and MPI do) and carry nothing else.
struct HostsParts {
  ProcessGroupPtr exchange;           ///< of what hosts have summed
  ProcessGroupPtr results;            ///< the same one, or another, so that they do not wait for the next exchange
  std::vector<CommunicatorPtr> up;    ///< of each local replica; over the ranks of this host, which see one memory
  std::vector<CommunicatorPtr> down;  ///< likewise
  std::shared_ptr<LostWorkers> lost;  ///< null: nobody tells
  bool may_abort = false;             ///< the process groups, by c10d::Backend::abort, when something fails here
};

/// One handle a local replica of `worker`. Sums follow the tree over all ranks, to the last bit, wherever the ranks
/// are. Every host sends and receives each element of a sum twice less 2 / hosts, whatever the number of its ranks
/// (more where its ranks are no whole part of the tree), over one process for each stripe of the layout. What a process
/// group says of a connection that ended becomes PeerLost, with the worker where one is told of, else with rank -1.
std::vector<CommunicatorPtr> make_over_hosts(const HostsLayout& layout, int worker, HostsParts parts, bool check,
                                             Milliseconds timeout);

}  // namespace muster::comm
