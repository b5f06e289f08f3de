// The watch over a job's workers for calls that wait for one another: one in step() and another in reduce(), say.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "comm/communicator.h"
#include "net/rendezvous.h"

namespace muster {

/// How far a worker has come in the sequence of its calls. All workers of a job make the same sequence, so that of two
/// places in it neither count of one is below that of the other and the other count above: where it is, the workers
/// make different calls, and wait for one another. A worker's place that is told late is an earlier one of its
/// sequence, which shows nothing that is not so.
struct CallPlace {
  uint64_t windows = 0;     ///< that it has begun to close, in step() or flush()
  uint64_t operations = 0;  ///< of the group for collectives outside steps
  std::string call;         ///< the last that the program made, as "step()"

  std::string text() const;
  /// Throws std::exception for another text.
  static CallPlace of(const std::string& text);
  bool contradicts(const CallPlace& other) const noexcept;
};

/// Tells the other workers through the store where this one is in its calls, once it has waited there for a pause's
/// length, from a thread of its own; nothing while calls follow one another, or the program is in none. Thread-safe.
/// Does nothing for a worker whose calls come from several threads, since these are in no order, nor where the store
/// fails, or no thread is to be had: who waits then hears of it elsewhere. A forked child's does nothing.
class CallWatch {
 public:
  /// `store`: of these workers alone, all with a prefix that no other watch has.
  CallWatch(const net::StorePtr& store, int rank, int num_workers, comm::Milliseconds pause);
  ~CallWatch();
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

  /// From here on. `is_in_call`: whether this worker is in a call that may wait for others, which the thread asks.
  /// `fail` is called once at most, by the thread, with a text that names both calls, where worker 0 and another one
  /// wait for one another; on all workers at about the same time. Neither throws nor blocks.
  void begin(std::function<bool()> is_in_call, std::function<void(const std::string&)> fail) noexcept;
  /// Neither function is called any more, nor running. Idempotent.
  void end() noexcept;
  /// From here on this worker tells nothing: a call that was interrupted counts, or not, whatever others do of it.
  void give_up() noexcept;

  void note_call(std::string_view call);
  void note_window();
  void note_operation();

 private:
  class Watcher;

  const std::shared_ptr<Watcher> watcher_;
};

/// Collective over `workers`, a group for collectives outside of steps, which becomes one that tells the watch of its
/// operations. Null, and the group as it was, where there is one worker, or no store.
std::shared_ptr<CallWatch> watch_calls(comm::CommunicatorPtr& workers, const net::StorePtr& store,
                                       comm::Milliseconds timeout);

}  // namespace muster
