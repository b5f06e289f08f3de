// NCCL and CUDA without a device: the tables of comm/nccl/api.h over host memory. Streams are threads, so that what is
// ordered wrongly is seen; the calling thread is its own current stream. It is as strict as the real one: a call on a
// communicator that is still in progress fails, and what was launched reaches its stream only once it was polled.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/api.h"
#include "support/run_ranks.h"

namespace muster::testing {

/// One world per test: every rank of the test lives in it. Thread-safe.
class FakeNccl {
 public:
  comm::nccl::NcclApi nccl();
  comm::nccl::DeviceApi device();

  /// How often a communicator says that it is in progress after each call.
  int polls = 3;
  bool has_windows = true;
  bool has_split = true;
  /// While true, the calling threads' current streams are being captured.
  bool is_capturing = false;

  /// The next call of this name fails with this status; the device's "copy" throws.
  void fail_next(const std::string& name, comm::nccl::Status status);
  /// The rank reports this from now on.
  void set_async_error(int rank, comm::nccl::Status status);
  /// Communicators of the rank stay in progress.
  void hang(int rank);
  /// The calling thread's current stream becomes one of its own, which runs `task` some time later; join_stream waits
  /// for all that it holds and makes the thread its own current stream again.
  void run_on_stream(std::function<void()> task);
  void join_stream();
  /// Streams run nothing while held.
  void hold_streams(bool held);
  /// Groups of blocking communicators do not end while held, unless those are aborted.
  void hold_groups(bool held);
  /// While held, CUDA graphs hold calls of every communicator: none of them ends.
  void hold_graphs(bool held);

  /// What was called, in order: "start 0", "group 2" (a group of two calls), "all_reduce 1", "abort 0", "free", ... and
  /// of the device: "copy 0 1" (to device 0 from device 1), "tree_sum 3" (of three sources).
  std::vector<std::string> log();
  int count(const std::string& entry);
  /// What each start was given as max_ctas, in order.
  std::vector<int> max_ctas();
  int live_events();
  int live_streams();

 private:
  struct Flag;
  struct FakeStream;
  struct FakeComm;
  struct Meeting;
  struct Operation;

  void note(const std::string& entry);
  void enqueue_work(const std::string& name, const std::string& entry, comm::nccl::Stream stream,
                    std::function<void()> task);
  comm::nccl::Status enqueue(const char* name, comm::nccl::Comm comm, Operation operation);
  comm::nccl::Status begin(const char* name, comm::nccl::Comm comm);
  void flush(FakeComm& comm);  // mutex_ held
  void execute(FakeComm& comm, uint64_t first, const std::vector<Operation>& operations);
  void meet(FakeComm& comm, uint64_t number, const Operation& operation);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> log_;
  std::vector<int> ctas_;
  std::map<std::string, comm::nccl::Status> failures_;
  std::map<int, comm::nccl::Status> async_errors_;
  std::set<int> hanging_;
  std::map<std::string, std::vector<FakeComm*>> groups_;  // by id
  std::map<std::pair<std::string, uint64_t>, std::shared_ptr<Meeting>> meetings_;
  std::map<std::string, std::deque<std::vector<char>>> mail_;  // by "id source destination"
  std::vector<std::shared_ptr<FakeComm>> comms_;
  int ids_ = 0;
  int live_events_ = 0;
  int live_streams_ = 0;
  bool is_held_ = false;
  bool are_groups_held_ = false;
  bool are_graphs_held_ = false;
};

/// Every rank a clique of its own, over a control group, comparing requests.
struct Nccl {
  static constexpr const char* kName = "nccl";
  static std::string run(int size, const Body& body, comm::Milliseconds timeout = Seconds(60));
};

/// All ranks in one clique, whose operations one thread launches.
struct NcclOneProcess {
  static constexpr const char* kName = "nccl, one process";
  static std::string run(int size, const Body& body, comm::Milliseconds timeout = Seconds(60));
};

/// The same without NCCL: all ranks on one device.
struct DeviceLocal {
  static constexpr const char* kName = "device local";
  static std::string run(int size, const Body& body, comm::Milliseconds timeout = Seconds(60));
};

}  // namespace muster::testing
