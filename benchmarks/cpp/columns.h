// Ways to train a model on one batch, each a function that makes a step.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "models.h"

namespace benchmark {

using Step = std::function<void()>;

/// A value.
struct Setting {
  Model model;
  /// "sgd"; "adamw": torch::optim::AdamW where Muster is absent; "fused_adamw": at::_fused_adamw_ there.
  std::string optimizer;
  double lr;
  /// Of this process's batch, which columns with two replicas divide.
  int64_t rows;
  int rank;
  /// Where workers meet, "host:port"; empty without other workers.
  std::string address;
};

/// The columns of one process. Owned by the thread that makes it.
///
/// - alone, two_intra_op: one replica with one intra-op thread, or two.
/// - threads: two threads with a model each, forward and backward alone.
/// - stepping_threads: the same, with an optimizer step.
/// - mirrored: MirroredStrategy of two logical replicas.
/// - workers: MultiWorkerMirroredStrategy of two workers, this one with the whole batch.
class Columns {
 public:
  /// Collective over the workers where `workers` is among the names. Throws std::invalid_argument for another name.
  Columns(const Setting& setting, const std::vector<std::string>& names);
  ~Columns();
  Columns(const Columns&) = delete;
  Columns& operator=(const Columns&) = delete;

  /// Throws std::out_of_range for a column that is not there.
  const Step& step(const std::string& name) const { return steps_.at(name); }

  /// Collective where `workers` is there. Throws std::runtime_error unless all workers have learnt the same.
  void check_agreement() const;

 private:
  struct Strategies;
  std::unique_ptr<Strategies> strategies_;
  std::map<std::string, Step> steps_;  // destroyed first: they use the strategies
};

}  // namespace benchmark
