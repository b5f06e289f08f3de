// The exchange of a set with the parameter servers that hold it: pushes, agreement, steps and values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "job/server_job.h"
#include "muster/options.h"
#include "optimizer/flat_optimizer.h"
#include "server/worker/client.h"
#include "window/embedding_rows.h"
#include "window/server_cut.h"
#include "window/server_values.h"

namespace muster {

/// Owned by the thread that steps; in a step take() is called by one of its replicas, and row sources by all of them,
/// while that thread waits. Functions that reach a server throw PeerLost naming a server that is gone, server::Fenced
/// when this worker no longer counts, and Timeout; a window that was cut short by an error cannot be taken up again.
///
/// Rows of an embedding's weight are on the servers alone: the weight becomes a stub whose row source asks them.
class ServerExchange {
 public:
  /// Connects; the first worker's plan counts. Where the servers hold no values yet rank 0 gives them its own, and the
  /// optimizer's state; every worker then has theirs. Blocks until rank 0 has. Throws LayoutMismatch naming the first
  /// difference to what the servers hold, InvalidArgument for a parameter that they cannot step. Rank 0 gives only rows
  /// that differ from their initialiser's.
  ServerExchange(const ServerJob& job, int rank, int workers, const StrategyOptions& options,
                 const ServerParameters& parameters);
  /// Leaves the job; servers that are gone are left alone. Never throws.
  ~ServerExchange();
  ServerExchange(const ServerExchange&) = delete;
  ServerExchange& operator=(const ServerExchange&) = delete;

  /// What this worker and the servers have agreed on.
  const server::Plan& plan() const noexcept { return plan_; }

  /// The step after which this worker came in.
  uint64_t since() const noexcept { return since_; }

  /// Begins a window. Throws InvalidArgument where a parameter was written or got other memory since the last step, of
  /// which servers would not know; a write past the version counter, through `.data`, is found by a sample of each
  /// parameter. Throws CommError where the last window was cut short.
  void open();

  /// Takes this worker's sum over the window of one parameter: dense, in the accumulation dtype, with the strides of
  /// its slot. Called once a window for every parameter. The sum must stay as it is until agree() or step(). Chunks
  /// whose parameters all came are pushed.
  void take(size_t parameter, const at::Tensor& sums);

  /// Whether a parameter's rows are on the servers alone; it is then left out of take().
  bool has_rows(size_t parameter) const noexcept { return places_[parameter].is_table; }
  /// Takes this worker's sums over the window of such a parameter's rows: coalesced COO, fp32; undefined where there
  /// are none. Called once a window for every such parameter, before agree() and step().
  void take_rows(size_t parameter, const at::Tensor& sums);

  /// Adds `tail` (fp64) over the workers that count, in place and along the tree, and returns their records in rank
  /// order, (rank, record). Waits for them. Only in a synchronous job, after take() of every parameter.
  std::vector<std::pair<uint32_t, std::string>> agree(const at::Tensor& tail, std::string record);

  /// Ranks whose parts made the last step that was agreed on, without those that watched, ascending; only in a
  /// synchronous job.
  const std::vector<uint32_t>& members() const noexcept { return givers_; }
  /// Removes a rank that watched, and gave no part, from members().
  void leave_out(uint32_t watcher) {
    std::erase(givers_, watcher);
    has_lost_ = true;  // it came in place of another one, which the others may not have missed
  }
  /// Ranks expected in the next step, ascending; only in a synchronous job.
  const std::vector<uint32_t>& expected() const noexcept { return decision_.next_members; }
  /// Whether a rank was ever missing among the expected ones, or another one came in its place: workers can no longer
  /// communicate among themselves then.
  bool has_lost() const noexcept { return has_lost_; }

  /// The partials of the sums over workers as one; parameters that nobody used were given as zeros, which add nothing.
  /// Only in a synchronous job, after agree().
  kernels::NormSum norm_sum() { return client_.sum(step_ + 1, decision_.members); }

  /// Steps on the servers, the parameters but `unused` (ascending), and brings their values here: in a synchronous job
  /// this step's, else the newest; there it waits while this worker is too far ahead.
  /// Throws InvalidArgument for groups that the plan's check_groups() refuses, and ends the window like skip().
  void step(const kernels::StepScalars& scalars, const FlatGroups& groups, const std::vector<size_t>& unused);

  /// Ends the window without changing anything.
  void skip();

  /// Adds dealt batches to those that the window is made of; once it has ended, servers deal them to nobody else.
  void note_batches(const std::vector<server::BatchId>& batches);

  /// Deals a batch, or ends a pass, as ServerClient; for workers that step on their own. For one that joined, passes
  /// before those that others were in when it came have ended.
  server::Dealt deal(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished);
  void end_pass(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished);

  /// How far the passes are that batches were dealt of.
  std::vector<server::PassProgress> passes() { return client_.passes(); }

  /// Brings the newest values here. No-op in a synchronous job, where every step brings them.
  void refresh();

  /// By part, every parameter's as the servers hold it, of the parameter's sizes (Part::steps: 0-dim fp32); undefined
  /// where there is none. `to_stay`: without the parameters whose rows bring_back() leaves on the servers. Tables
  /// travel once for all parts.
  std::vector<std::vector<at::Tensor>> fetch(std::span<const server::Part> parts, bool to_stay = false);

  /// Has servers write what they hold, as it is after the last step, into a checkpoint's draft, while steps go on;
  /// where workers step on their own, as it is when they come to it. Until end_cut() stand-ins come from fetch() and
  /// contents() for what they write: parameters in row-major order that nobody else wrote since, with their state, and
  /// tables whose weights had no rows here. Returns once all have begun; null where one refuses, as the log says: it is
  /// not asked again about that folder.
  std::shared_ptr<const ServerCut> begin_cut(const std::filesystem::path& draft);
  void end_cut() noexcept { saving_.cut.reset(); }
  /// What stands for a parameter's values, until end_cut(); undefined where servers do not write them.
  at::Tensor stand_in(size_t parameter) const;

  /// The rows that servers keep of a parameter of which has_rows() is true.
  TableContents contents(size_t parameter);

  /// Before this worker leaves: gives weights all their rows again, but not weights that had none here to begin with,
  /// and brings the newest values, unless user code wrote some since the last step, or a window is open. Never throws:
  /// where servers are gone, stubs and values stay.
  void bring_back() noexcept;

 private:
  /// Where a parameter is in the plan.
  struct Place {
    bool is_table;
    size_t index;
  };
  void connect(const ServerParameters& given, const ServerJob& job, bool is_chief);
  void push(uint32_t chunk);
  void noting_failure(const std::function<void()>& push);
  server::Apply command(const kernels::StepScalars& scalars) const;
  void finish(const server::Apply& apply, bool changes);
  /// The step that reads wait for: where workers step on their own, none.
  uint64_t newest() const noexcept { return plan_.is_synchronous() ? step_ : 0; }

  const server::Plan plan_;
  const uint32_t rank_;
  const bool joins_;
  std::vector<Place> places_;  // by parameter
  struct {
    std::vector<uint32_t> begun;  // parameters of the plan whose state was there before the first step
    std::shared_ptr<const ServerCut> cut;
    std::set<std::filesystem::path> refused;  // folders that a server cannot write to
  } saving_;
  FlatGroups groups_;   // of the last step
  std::mutex in_step_;  // held by replicas that use the client in a step; none of them waits for another meanwhile
  server::ServerClient client_;
  ServerValues values_;
  RowsOnServers rows_;
  std::vector<std::vector<uint32_t>> chunks_of_;  // by parameter of the plan, one for each piece
  uint64_t since_ = 0;
  uint64_t step_ = 0;                     // the last one that ended
  std::vector<at::Tensor> sums_;          // of the window, by parameter of the plan
  std::vector<size_t> missing_;           // of the window: pieces by chunk
  std::vector<server::BatchId> batches_;  // of the window
  struct {
    bool is_open = false;        // something of the window was taken
    std::exception_ptr failure;  // why something of it could not be
  } window_;
  bool has_lost_ = false;
  server::Decision decision_;
  std::vector<uint32_t> givers_;  // members that did not merely watch
};

}  // namespace muster
