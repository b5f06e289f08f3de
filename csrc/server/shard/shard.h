// What one server owns: chunks of parameters with their optimizer state, tables, and the pushes that wait to be
// applied.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"
#include "server/shard/held_chunk.h"
#include "server/shard/held_sums.h"
#include "server/shard/image.h"
#include "server/shard/pushes.h"
#include "server/shard/table_shard.h"

namespace muster::server {

/// Thread-safe: one mutex a chunk. Chunks are named by their index in cut_chunks(plan); one that another server owns is
/// an InvalidArgument.
class Shard {
 public:
  /// `may_push`: see Steps. `time` must outlive it. Throws InvalidArgument for tables that no server can step.
  Shard(const Plan& plan, uint32_t server, Steps::MayPush may_push, Timekeeper& time);
  ~Shard();

  const Plan& plan() const noexcept { return plan_; }
  const std::vector<uint32_t>& chunks() const noexcept { return own_; }  ///< ascending
  TableShard& tables() noexcept { return tables_; }
  const TableShard& tables() const noexcept { return tables_; }
  int64_t parameter_bytes() const noexcept { return parameter_bytes_; }  ///< of all its chunks

  /// Replaces a part of a chunk; `payload` has exactly its bytes. Creates state that is not there yet.
  void write(uint32_t chunk, Part part, Bytes payload);

  /// Calls `consume` with the part's bytes (none where there is no such state) and the number of steps made, once that
  /// is `at_least`; nobody changes them meanwhile. Helps with a step that is being applied. Throws Timeout at the
  /// deadline.
  using Consume = HeldChunk::Consume;
  void read(uint32_t chunk, Part part, uint64_t at_least, Deadline deadline, const Consume& consume);

  /// Keeps a push until it is applied; `owner` keeps its memory alive. False: it is held or applied already. Throws
  /// InvalidArgument above Pushes::kMaxHeld.
  bool hold(uint32_t rank, uint64_t incarnation, const Push& push, Bytes payload, std::shared_ptr<const void> owner);

  /// Adds what `members` pushed of a chunk, ahead of the demand, if all of them did.
  void sum_early(uint32_t chunk, uint64_t step, const std::vector<uint32_t>& members);

  /// The norm of the sums over `members`, of all chunks and tables. Waits for pushes that may still come. Several
  /// threads, each for another rank, divide what is not added yet.
  kernels::NormSum sum(uint32_t rank, uint64_t step, const std::vector<uint32_t>& members, Deadline deadline);

  /// The commands of steps; of a synchronous job the first one of a step counts.
  Steps& commands() noexcept { return rules_; }

  /// See Apply; of tables, too. Several threads may apply one step: they divide its chunks and stripes. Synchronous:
  /// returns once all have made the step. Else steps from the pushes of `rank`, each once.
  void apply(uint32_t rank, uint64_t incarnation, const Apply& apply, Deadline deadline);

  /// Of a synchronous job whose workers are all gone: whether all chunks and tables have made the command's step, or do
  /// so now from what they hold.
  bool settle(const Apply& command);
  /// Drops all pushes: a job that is over may have left some.
  void drop_all();

  /// By chunk, then by table (of all its stripes), the last step that was applied whole: of the worker's incarnation,
  /// where steps are not made together. Waits for nobody.
  std::vector<uint64_t> steps(uint32_t rank, uint64_t incarnation);

  /// The smallest of steps(); UINT64_MAX where this server owns nothing.
  uint64_t least_step(uint32_t rank, uint64_t incarnation);

  /// Drops what a worker's incarnations up to this one pushed and nobody will apply: of steps that are not made
  /// together.
  void drop_pushes(uint32_t rank, uint64_t incarnation);

  /// Makes who waits look again. Waits for nobody.
  void wake();
  /// Stops: waiting calls, and later ones that would wait, throw CommError.
  void stop();

  /// Bytes of pushes that are held.
  int64_t held_bytes() const noexcept { return rules_.held_bytes; }

  /// Its chunks, then the stripes of its tables.
  const std::vector<HeldSums*>& members() const noexcept { return members_; }
  /// Of members(), each as it is when its turn comes.
  using Take = std::unique_ptr<Image> (HeldSums::*)();
  std::vector<std::unique_ptr<Image>> begin_images(Take take = &HeldSums::begin_image) const;

 private:
  HeldChunk& chunk(uint32_t index) const;
  /// members() in an order in which the threads of other ranks begin elsewhere, so that they divide the work.
  std::vector<HeldSums*> order_for(uint32_t rank) const;

  const Plan plan_;
  Steps rules_;
  std::vector<uint32_t> own_;
  int64_t parameter_bytes_ = 0;
  std::map<uint32_t, std::unique_ptr<HeldChunk>> chunks_;  // by index
  TableShard tables_;
  std::vector<HeldSums*> members_;  // chunks, then stripes of tables
};

}  // namespace muster::server
