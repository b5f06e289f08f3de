// A prepared loader over a torch::data data set: every global batch is divided over the replicas of the job, and each
// worker reads only its own parts.
#pragma once

#include <torch/data/datasets/base.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/batch.h"
#include "muster/per_replica.h"

namespace muster {

class Strategy;

/// A value.
struct LoaderOptions {
  /// Samples of the global batch; with `sharded`, of this worker's.
  int64_t batch_size = 1;
  /// A new order in each epoch, equal on all ranks and to that of Python's loader with the same seed.
  bool shuffle = false;
  /// Leaves out a last batch that is short.
  bool drop_last = false;
  /// Threads that read ahead, each with its own copy of the data set (the first has the loader's); 0 reads a batch when
  /// the loop asks for it. It is read before, so that a data set gives each batch memory of its own, where threads
  /// read, with `sharded`, where parameter servers deal batches or live workers divide them, and of streams by a step
  /// that leaves its window open, unless its batch is the pass's last.
  int workers = 0;
  /// The data set is this worker's own: its batches are divided over the local replicas alone, and a worker that runs
  /// out goes on with empty parts until none has data.
  bool sharded = false;
};

/// Where a loop over a loader is, for a job that is started again. A value.
struct LoaderState {
  int64_t epoch = 0;    ///< as Loader::epoch
  int64_t batches = 0;  ///< of the pass under way, that were yielded, or passed over since they could not be read

  /// Whether both are equal.
  bool operator==(const LoaderState&) const = default;
};

namespace detail {

/// One read: the indices of each local part, or of a stream the next batch.
struct ReadTask {
  std::vector<std::vector<size_t>> parts;
  /// The sample whose structure an empty part takes; set if a part is empty.
  std::optional<size_t> model;
  /// By part; empty: all are equal, and a stream's samples are dealt in turn.
  std::vector<double> capacities;
  /// The first read of a pass: a stream starts again.
  bool first = false;
};

/// Which parts of a batch are this worker's: `local` of `parts`, from `first` on.
struct Deal {
  int parts = 1;
  int first = 0;
  int local = 1;
};

class LoaderHost;

/// The part of a strategy that its loaders need; keeps what was prepared with it alive.
std::shared_ptr<LoaderHost> host_of(Strategy& strategy);

/// What a loader does that does not depend on the type of its batches. Owned by the thread that iterates.
class LoaderCore {
 public:
  /// Reads the parts of one batch; null at the end of a stream. Called by reader thread `thread` (0 without threads).
  using Read = std::function<std::shared_ptr<void>(size_t thread, const ReadTask& task)>;

  /// `size`: samples of the data set, empty for a stream. Throws InvalidArgument for options that cannot be honoured.
  LoaderCore(std::shared_ptr<LoaderHost> host, const LoaderOptions& options, bool is_stream, std::optional<size_t> size,
             Read read);
  ~LoaderCore();
  LoaderCore(const LoaderCore&) = delete;
  LoaderCore& operator=(const LoaderCore&) = delete;

  const Deal& deal() const noexcept;
  const std::shared_ptr<LoaderProgress>& progress() const noexcept;

  /// Starts a pass, ending one that is under way. The loop holds what it returns: without it the pass counts as left.
  std::shared_ptr<void> begin();
  /// Whether the pass has another batch, which `take` then gives: null where only other workers have data. Collective
  /// if sharded, but where workers step on their own.
  /// Throws InvalidArgument where a pass has begun since the one that `pass` holds, or the loader was loaded.
  bool advance(const std::shared_ptr<void>& pass);
  std::shared_ptr<void> take();
  /// Of that batch, counted from 1 over all passes.
  int64_t number() const noexcept;

  int64_t epoch() const noexcept;
  void set_epoch(int64_t epoch);
  LoaderState state() const;
  void load_state(const LoaderState& state);
  std::optional<int64_t> size() const noexcept;

 private:
  void check_place() const;

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace detail

/// Iterating it is one epoch and yields PerReplica<Batch>, a part for each local replica:
///
///     for (auto& batch : loader) strategy.step(fn, batch);
///
/// By index (a data set whose request is indices): the order is cut into global batches, these into contiguous parts,
/// and only this worker's are read. Streams (StatefulDataset, StreamDataset): every worker reads the whole stream, and
/// sample j of a batch goes to replica j modulo their number (parts of unequal capacity, Balance::automatic, are
/// contiguous); sharded, each worker reads its own. Every sample is in exactly one part; a part without samples has the
/// structure of the batch's first sample with 0 rows.
///
/// With `shuffle` the order is that of Python's loader: a generator seeded with stream_seed(seed ^ 0x6C6F61646572,
/// loader's index, epoch) draws an int64, which seeds the generator of randperm(n).
///
/// Where workers of parameter servers step together, batches of a data set that is read by index are divided over those
/// which are live, and what one had of a batch when it died comes once more, as a batch of its own.
///
/// Where parameter servers let workers step on their own (ServerOptions::staleness), they deal whole batches of a data
/// set that is read by index, in order, to whichever worker asks: all samples of an epoch go to one worker or another,
/// and a worker that is through waits at the end of its pass for what the others may leave (Timeout after the
/// strategy's). The first pass connects, and needs the module and its optimizer prepared. A pass is left early when its
/// last iterator is gone before its end, or `begin()` is called again: what is not finished goes to the others with the
/// next call of the strategy that steps, runs or communicates, or when it is closed. A sharded loader is this worker's
/// own there.
///
/// One pass at a time: `begin()` ends the one before, whose loop gets InvalidArgument for its next batch. All ranks
/// iterate together, unless batches are dealt. Externally synchronised, and not to be advanced while a step runs, nor
/// moved while a loop over it does. Must not outlive the data that its data set refers to.
template <class Dataset>
class Loader {
  using Returned = typename Dataset::BatchType;
  using Request = typename Dataset::BatchRequestType;
  static constexpr bool kIsStream = std::is_same_v<Request, size_t>;
  static_assert(kIsStream || std::is_constructible_v<Request, c10::ArrayRef<size_t>>,
                "a data set is read by c10::ArrayRef<size_t> (indices) or by size_t (samples of a stream)");

  template <class R>
  struct Unwrap {
    using type = R;
  };
  template <class R>
  struct Unwrap<std::optional<R>> {
    using type = R;
  };

 public:
  /// What the data set gives for one part.
  using Batch = typename Unwrap<Returned>::type;
  /// A global batch: this worker's parts.
  using value_type = PerReplica<Batch>;

  /// Made by Strategy::prepare_loader.
  Loader(Strategy& strategy, Dataset dataset, const LoaderOptions& options)
      : reader_(std::make_shared<Reader>(std::move(dataset), options)),
        core_(std::make_unique<detail::LoaderCore>(
            detail::host_of(strategy), options, kIsStream, reader_->size(),
            [reader = reader_](size_t thread, const detail::ReadTask& task) { return reader->read(thread, task); })) {
    reader_->deal = core_->deal();
  }

  /// An input iterator over global batches.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = PerReplica<Batch>;
    using difference_type = std::ptrdiff_t;
    using pointer = value_type*;
    using reference = value_type&;

    Iterator() = default;
    Iterator(Loader* loader, std::shared_ptr<void> pass) : loader_(loader), pass_(std::move(pass)) { ++*this; }
    reference operator*() const { return loader_->current_; }
    pointer operator->() const { return &loader_->current_; }
    /// The next batch. What reading it threw is thrown here; where no other worker has parts of it, another ++ goes on
    /// behind it (data that is read by index).
    Iterator& operator++() {
      if (!loader_->advance(pass_)) *this = {};
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(const Iterator& other) const noexcept { return loader_ == other.loader_; }

   private:
    Loader* loader_ = nullptr;
    std::shared_ptr<void> pass_;
  };

  /// Starts an epoch and reads its first batch.
  Iterator begin() { return Iterator(this, core_->begin()); }
  /// The end of the epoch.
  Iterator end() { return {}; }

  /// Counts from 0: that of the pass under way and, once it has run to its end, of the next one. A pass that was left
  /// early counts when the next begins.
  int64_t epoch() const noexcept { return core_->epoch(); }
  /// Makes the next pass that epoch. Throws InvalidArgument if negative.
  void set_epoch(int64_t epoch) { core_->set_epoch(epoch); }

  /// Where the loop is: a batch counts from when it was yielded (of those that live workers divide, from its step), so
  /// call this after its step. Equal on all ranks.
  /// Local. Of batches that live workers divide, one of which a worker that died left something undone counts as not
  /// trained on, and what comes behind it: a warning says so. Throws InvalidArgument where parameter servers deal the
  /// batches, which are those of no one worker.
  LoaderState state() const { return core_->state(); }
  /// Makes the next pass go on after the batches that `state` counts, with the order that they had. Of data that is
  /// read by index those are not read again, of a stream they are read and dropped. Load the same on all ranks. Throws
  /// InvalidArgument as state(), and for negative numbers.
  void load_state(const LoaderState& state) { core_->load_state(state); }

  /// Global batches per epoch (this worker's, if sharded); empty for a stream.
  std::optional<int64_t> size() const noexcept { return core_->size(); }

 private:
  struct Parts {
    std::vector<Batch> values;
    std::vector<int64_t> rows;
  };

  // Shared with the reader threads. Threads beyond the first read from copies.
  struct Reader {
    Reader(Dataset dataset, const LoaderOptions& options)
        : batch_size(options.batch_size), drop_last(options.drop_last) {
      datasets.push_back(std::move(dataset));
      for (int i = 1; i < options.workers && !kIsStream; ++i) {
        if constexpr (std::copy_constructible<Dataset>) {
          datasets.push_back(Dataset(datasets.front()));
        } else {
          throw InvalidArgument(
              "this data set cannot be copied, so that one thread must read it; pass workers=1, or "
              "share it with torch::data::datasets::make_shared_dataset");
        }
      }
    }

    std::optional<size_t> size() const {
      if constexpr (kIsStream) {
        return std::nullopt;
      } else {
        return datasets.front().size();
      }
    }

    std::shared_ptr<void> read(size_t thread, const detail::ReadTask& task) {
      if constexpr (kIsStream) {
        return read_stream(task);
      } else {
        return read_indices(datasets[thread], task);
      }
    }

    std::shared_ptr<void> read_indices(Dataset& dataset, const detail::ReadTask& task) {
      auto parts = std::make_shared<Parts>();
      for (const auto& indices : task.parts) {
        parts->rows.push_back(static_cast<int64_t>(indices.size()));
        if (!indices.empty()) {
          parts->values.push_back(detail::placed<Batch>(dataset.get_batch(c10::ArrayRef<size_t>(indices))));
          continue;
        }
        const std::vector<size_t> model{*task.model};
        parts->values.push_back(emptied(dataset.get_batch(c10::ArrayRef<size_t>(model))));
      }
      return parts;
    }

    std::shared_ptr<void> read_stream(const detail::ReadTask& task) {
      auto& dataset = datasets.front();
      if constexpr (requires { dataset.reset(); }) {
        if (task.first) dataset.reset();
      }
      while (std::optional<Batch> batch = dataset.get_batch(static_cast<size_t>(batch_size))) {
        const int64_t rows = detail::rows_of(*batch);
        const bool is_short = rows >= 0 && rows < batch_size;
        if (!drop_last || !is_short) return dealt(*batch, rows, task.capacities);
      }
      return nullptr;
    }

    std::shared_ptr<void> dealt(const Batch& batch, int64_t rows, const std::vector<double>& capacities) const {
      auto parts = std::make_shared<Parts>();
      if (deal.parts == 1) {
        parts->values.push_back(detail::placed(batch));
        parts->rows.push_back(rows);
        return parts;
      }
      if constexpr (detail::Batch<Batch>::kDivisible) {
        if (rows < 0)
          throw InvalidArgument(
              "the tensors of the stream's batch differ in size(0), so that its samples "
              "cannot be dealt; pass sharded=true with one local replica");
        if (!capacities.empty()) {
          parts->values = detail::split(batch, deal.parts, capacities);
          parts->rows = detail::part_sizes(rows, deal.parts, capacities);
          return parts;
        }
        for (int64_t part = deal.first; part < deal.first + deal.local; ++part) {
          parts->values.push_back(detail::Batch<Batch>::take(batch, std::min(part, rows), rows, deal.parts));
          parts->rows.push_back(detail::rows_of(parts->values.back()));
        }
        return parts;
      } else {
        throw InvalidArgument(
            "samples of a stream whose batches are no Tensor, torch::data::Example or std::vector "
            "cannot be dealt; pass sharded=true with one local replica");
      }
    }

    std::vector<Dataset> datasets;
    int64_t batch_size;
    bool drop_last;
    detail::Deal deal;
  };

  static Batch emptied(const Batch& batch) {
    if constexpr (detail::Batch<Batch>::kDivisible) {
      return detail::rows_of(batch) < 0 ? batch : detail::Batch<Batch>::take(batch, 0, 0, 1);
    } else {
      return batch;
    }
  }

  bool advance(const std::shared_ptr<void>& pass) {
    if (!core_->advance(pass)) {
      current_ = {};
      return false;
    }
    if (const auto read = std::static_pointer_cast<Parts>(core_->take())) {
      empty_ = emptied(read->values.front());
      current_ = PerReplica<Batch>(std::move(read->values), std::move(read->rows), core_->progress(), core_->number());
    } else {
      const auto local = static_cast<size_t>(core_->deal().local);
      current_ = PerReplica<Batch>(std::vector<Batch>(local, empty_), std::vector<int64_t>(local, 0), core_->progress(),
                                   core_->number());
    }
    return true;
  }

  std::shared_ptr<Reader> reader_;
  std::unique_ptr<detail::LoaderCore> core_;
  PerReplica<Batch> current_;
  Batch empty_{};
};

}  // namespace muster
