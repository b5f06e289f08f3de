// Puts collectives of this process's ranks onto the devices: in which order, on which streams, and until when.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/nccl/clique.h"
#include "comm/nccl/event_pool.h"
#include "comm/request.h"

namespace muster::comm::nccl {

/// One rank's part in a collective. What the rank gives:
struct LaunchPart {
  Request request;  ///< compared with those of the other ranks of this process
  /// Called once, in a group with the other ranks' parts. Empty: nothing goes to the device.
  std::function<Status(Comm, Stream)> encode;
  std::vector<at::Tensor> tensors;  ///< kept until the device is done with them
  std::vector<bool> takes_part;     ///< by rank of this process; empty: all. The same at each that takes part
};

/// A part that was posted. Guarded by its launcher's mutex.
struct Launch {
  LaunchPart part;
  EventPtr ready;     ///< what the rank's current stream held when it posted
  EventPtr finished;  ///< null once finished
  Clock::time_point posted;
  bool is_captured = false;
  bool is_launched = false;
  bool is_finished = false;
};

using LaunchPtr = std::shared_ptr<Launch>;

/// One stream per rank of this process. With one rank, posting launches; with several, a thread launches part i of all
/// ranks that take part at once, when the last of them has posted its own: their threads may come in any order. Another
/// thread looks at the oldest parts under way and at NCCL's asynchronous errors, and ends the clique when a part takes
/// longer than the timeout: a host that waits for its device would wait for ever.
/// Thread-safe; each rank's parts are posted by one thread at a time.
class Launcher {
 public:
  explicit Launcher(std::shared_ptr<Clique> clique);
  /// Waits for what is under way, at most the timeout.
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  Clique& clique() noexcept { return *clique_; }
  const std::shared_ptr<Clique>& shared_clique() const noexcept { return clique_; }

  /// The part follows what the calling thread's current stream holds. Throws what ended the clique, and
  /// InvalidArgument for several ranks while the stream is captured.
  LaunchPtr post(int local, LaunchPart part);

  /// Blocks the host until the part is on its stream.
  void await_launched(int local, Launch& launch, Milliseconds timeout);
  /// Makes the calling thread's current stream wait for the part, which was launched.
  void join(int local, Launch& launch);
  /// Does not block.
  bool is_finished(int local, Launch& launch);
  /// Blocks the host until the device is done with the part.
  void await_finished(int local, Launch& launch, Milliseconds timeout);

  /// The rank posts no more; what its siblings post from then on fails. Parts already posted run.
  void leave(int local) noexcept;

 private:
  void run();
  void watch();
  void end_watch();
  void launch(const std::vector<LaunchPtr>& parts);  // as take_complete gives them
  void check_agreement(const std::vector<LaunchPtr>& parts) const;
  void reap();
  void check_left();                                 // mutex_ held
  std::vector<LaunchPtr> collect_finished_locked();  // mutex_ held; to be destroyed without it
  std::vector<LaunchPtr> take_complete();            // mutex_ held; by rank, null where one takes no part
  bool has_passed(const Launch& launch);             // on its device
  int device_of(int local) const { return clique_->options().devices[static_cast<size_t>(local)]; }
  std::string name_of(int local) const { return "rank " + std::to_string(clique_->options().first_rank + local); }
  [[noreturn]] void time_out(const std::string& message);

  struct Rank {
    Stream stream = nullptr;
    std::shared_ptr<EventPool> events;
    std::deque<LaunchPtr> posted;     // not launched yet
    std::deque<LaunchPtr> under_way;  // launched, in order
    bool has_left = false;
  };

  const std::shared_ptr<Clique> clique_;
  const NcclApi& nccl_;
  const DeviceApi& device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Rank> ranks_;  // guarded by mutex_, except streams and events
  bool stops_ = false;       // guarded by mutex_; nothing more is posted
  bool is_over_ = false;     // guarded by mutex_; nothing is under way
  std::thread launching_;    // with several ranks
  std::thread watching_;
};

}  // namespace muster::comm::nccl
