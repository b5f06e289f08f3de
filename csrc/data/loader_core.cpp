#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "core/replica_context.h"
#include "data/loader_host.h"
#include "data/read_ahead.h"
#include "muster/error.h"
#include "muster/loader.h"

namespace muster::detail {

namespace {

constexpr uint64_t kLoaders = 0x6C6F61646572;  // "loader": keeps loaders' streams apart from replicas'

// None where all are equal, so that a stream is dealt as it is without balance.
std::vector<double> unequal(std::vector<double> capacities) {
  const bool are_equal =
      std::adjacent_find(capacities.begin(), capacities.end(), std::not_equal_to<>()) == capacities.end();
  return are_equal ? std::vector<double>{} : std::move(capacities);
}

// The order that Python's RandomSampler has when torch's default generator is seeded with the epoch's seed.
std::vector<size_t> shuffled(size_t n, uint64_t seed) {
  const auto sampler_seed = at::empty({}, at::kLong);
  sampler_seed.random_(at::detail::createCPUGenerator(seed));
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(sampler_seed.item<int64_t>()));
  const auto order = at::randperm(static_cast<int64_t>(n), generator, at::kLong);
  const auto* first = order.const_data_ptr<int64_t>();
  return {first, first + n};
}

// A loop's, over the pass with that number: tells that it was left when it goes.
struct PassHold {
  PassHold(int64_t number, std::shared_ptr<LoaderProgress> progress, std::shared_ptr<LoaderPlace> place,
           std::shared_ptr<LoaderHost> host)
      : number(number), progress(std::move(progress)), place(std::move(place)), host(std::move(host)) {}
  ~PassHold() {
    progress->leave(number);
    if (progress->passes == number) place->left_at = host->steps();
  }
  PassHold(const PassHold&) = delete;
  PassHold& operator=(const PassHold&) = delete;

  const int64_t number;
  const std::shared_ptr<LoaderProgress> progress;
  const std::shared_ptr<LoaderPlace> place;
  const std::shared_ptr<LoaderHost> host;
  std::shared_ptr<void> of_pass;
};

}  // namespace

void LoaderPlace::go_to(int64_t that_epoch, int64_t batches) {
  epoch = that_epoch;
  to_skip = batches;
  running = false;
  left_at = std::nullopt;
  yielded = 0;
  shared = nullptr;
}

LoaderState state_of(const LoaderPlace& place, int64_t steps) {
  if (!place.running) return {place.epoch, place.to_skip};
  const bool was_left = place.left_at && steps > *place.left_at;
  if (was_left || place.is_over) return {place.epoch + 1, 0};
  return {place.epoch, place.shared ? place.shared->num_trained() : place.yielded};
}

void take_state(LoaderPlace& place, const LoaderState& state) {
  if (state.epoch < 0 || state.batches < 0) {
    throw InvalidArgument("a loader's state counts epochs and batches from 0; pass what state() gave");
  }
  place.go_to(state.epoch, state.batches);
  ++place.num_loads;
}

struct LoaderCore::State {
  std::shared_ptr<LoaderHost> host;
  LoaderJob job;
  LoaderOptions options;
  bool is_stream;
  size_t samples;
  Read read;
  Deal deal;
  int index;
  std::shared_ptr<LoaderProgress> progress;
  std::shared_ptr<LoaderPlace> place = std::make_shared<LoaderPlace>();
  bool ended = true;      // no worker has another batch
  int64_t num_loads = 0;  // of the place, when the pass under way began
  std::shared_ptr<void> current;
  int64_t next = 0;  // the batch to be read next, where there is no pass
  // Of the pass under way, at most one of them; `progress` has the same one.
  std::shared_ptr<DealtPass> dealt;
  std::shared_ptr<SharedPass> shared;
  ReadAhead::Batch ahead;
  bool more_ahead = false;
  bool is_ahead = false;  // the two above are of the batch that follows
  std::unique_ptr<ReadAhead> reads;

  bool is_dealt() const { return job.division == Division::none && !options.sharded; }
  bool is_shared() const { return job.division == Division::live_workers && !options.sharded && !is_stream; }

  // A stream's next batch is nobody's to know, and of other data all ranks read parts.
  bool goes_on_after_errors() const {
    return !is_stream && (options.sharded || is_dealt() || job.topology.num_workers == 1);
  }

  int64_t batches() const {
    if (is_stream) return std::numeric_limits<int64_t>::max();
    const auto n = static_cast<int64_t>(samples);
    return n / options.batch_size + (!options.drop_last && n % options.batch_size != 0 ? 1 : 0);
  }

  int64_t size_of(int64_t batch) const {
    return std::min(options.batch_size, static_cast<int64_t>(samples) - batch * options.batch_size);
  }

  SharedPass::NextBatch sizes_in_turn() const {
    return [this, batch = int64_t{0}]() mutable -> std::optional<int64_t> {
      if (batch == batches()) return std::nullopt;
      return size_of(batch++);
    };
  }

  ReadTask task_of(const std::vector<size_t>& order, int64_t number) const {
    ReadTask task;
    task.first = number == 0;
    task.capacities = unequal(host->capacities());
    if (is_stream) return task;
    const auto start = order.begin() + number * options.batch_size;
    const int64_t n = size_of(number);
    const auto sizes = part_sizes(n, deal.parts, task.capacities);
    auto next = start + std::accumulate(sizes.begin(), sizes.begin() + deal.first, int64_t{0});
    for (int part = deal.first; part < deal.first + deal.local; ++part) {
      const auto size = sizes[static_cast<size_t>(part)];
      task.parts.emplace_back(next, next + size);
      if (size == 0) task.model = *start;
      next += size;
    }
    return task;
  }

  static ReadTask shared_task_of(const SharedPass& pass, const std::vector<size_t>& order, int64_t number) {
    const auto part = pass.part_of(number);
    ReadTask task;
    auto next = order.begin() + part.begin;
    for (const int64_t size : part.sizes) {
      task.parts.emplace_back(next, next + size);
      if (size == 0) task.model = order[static_cast<size_t>(part.batch)];
      next += size;
    }
    return task;
  }

  std::optional<int64_t> next_number() {
    if (progress->pass) return progress->pass->next();
    return next < batches() ? std::optional(next++) : std::nullopt;
  }

  // Data may then fill one tensor again for each batch, or be filled by the loop.
  bool reads_when_asked() const { return options.workers == 0 && !options.sharded && !progress->pass; }

  // Whether the batch that was yielded last is its pass's, as far as is known.
  bool is_last() const { return is_ahead ? !more_ahead : !is_stream && next == batches(); }

  // Reads the batch that follows, unless it was read, and agrees with the workers that step together whether anybody
  // has one.
  void look_ahead() {
    if (std::exchange(is_ahead, true)) return;
    ahead = {};
    try {
      while (reads->has_room()) {
        const auto number = next_number();
        if (!number) break;
        reads->give(*number);
      }
      ahead = reads->take();
    } catch (...) {
      ahead.error = std::current_exception();
    }
    more_ahead = ahead.parts != nullptr || ahead.error != nullptr;
    if (options.sharded) more_ahead = host->any_has_more(more_ahead);
  }

  // Before the pass's next batch.
  void go_on() {
    is_ahead = false;
    if (!reads_when_asked()) look_ahead();
  }

  std::vector<size_t> order_of_pass() const {
    if (is_stream) return {};
    if (options.shuffle) {
      return shuffled(samples, stream_seed(host->seed() ^ kLoaders, static_cast<uint64_t>(index),
                                           static_cast<uint64_t>(place->epoch)));
    }
    std::vector<size_t> order(samples);
    std::iota(order.begin(), order.end(), size_t{0});
    return order;
  }

  // Reads batches of a new pass, and returns the number of the next one.
  int64_t pass_over_stream(int64_t batches) const {
    int64_t number = 0;
    while (number < batches && read(0, task_of({}, number)) != nullptr) ++number;
    return number;
  }

  // Nothing more comes of the pass.
  void end() {
    ended = true;
    reads.reset();
    if (shared) shared->end();
  }
};

LoaderCore::LoaderCore(std::shared_ptr<LoaderHost> host, const LoaderOptions& options, bool is_stream,
                       std::optional<size_t> size, Read read)
    : state_(std::make_unique<State>()) {
  const auto require = [](bool holds, const std::string& problem) {
    if (!holds) throw InvalidArgument(problem);
  };
  require(options.batch_size >= 1, "batch_size=" + std::to_string(options.batch_size) + ": it must be at least 1");
  require(options.workers >= 0, "workers=" + std::to_string(options.workers) + ": it must be at least 0");
  require(is_stream || size.has_value(),
          "the data set does not know its size, and is read by index; give it a size(), "
          "or make it a torch::data::datasets::StatefulDataset");
  require(!is_stream || !options.shuffle,
          "shuffle=true: a stream cannot be shuffled; let the data set do it in reset(), "
          "alike on all ranks");
  require(!is_stream || options.workers <= 1,
          "workers=" + std::to_string(options.workers) + ": one thread reads a stream; pass workers=1 or 0");
  auto& s = *state_;
  s.host = std::move(host);
  s.job = s.host->job();
  s.options = options;
  s.is_stream = is_stream;
  s.samples = size.value_or(0);
  s.read = std::move(read);
  require(!s.is_dealt() || !is_stream,
          "servers deal batches by number, which a stream has not; use a data set that is read by index, or "
          "sharded=true with data of this worker's own");
  require(s.is_dealt() || s.is_shared() || !s.job.joins,
          "this worker joined a running synchronous job, whose streams and sharded loaders do not tell where they are; "
          "step with batches of its own, or start all workers again");
  const auto& topology = s.job.topology;
  s.deal = options.sharded || s.is_dealt()
               ? Deal{topology.local_replicas(), 0, topology.local_replicas()}
               : Deal{topology.num_replicas, topology.first_replica, topology.local_replicas()};
  s.progress = std::make_shared<LoaderProgress>();
  s.progress->usual_rows = static_cast<double>(options.batch_size) / s.deal.parts;
  s.progress->find_end = [&s] {
    if (s.ended) return;
    s.look_ahead();
    if (!s.more_ahead) s.progress->note_end();
  };
  s.place->is_known = !s.is_dealt();
  if (!options.sharded) {
    s.place->extent.batch_size = options.batch_size;
    if (!is_stream) s.place->extent.size = static_cast<int64_t>(s.samples);
  }
  const std::string of_index = std::to_string(s.samples) + " samples in " + std::to_string(s.batches()) + " batches" +
                               (options.shuffle ? ", shuffled" : "");
  const std::string in_words = is_stream ? "a stream" : of_index;
  s.index = s.host->add(s.progress, s.place, options.sharded ? "" : in_words);
}

LoaderCore::~LoaderCore() {
  state_->place->is_over = !state_->progress->in_step;
  state_->progress->find_end = {};
}

const Deal& LoaderCore::deal() const noexcept { return state_->deal; }
const std::shared_ptr<LoaderProgress>& LoaderCore::progress() const noexcept { return state_->progress; }
int64_t LoaderCore::epoch() const noexcept { return state_->place->epoch; }

void LoaderCore::set_epoch(int64_t epoch) {
  if (epoch < 0) throw InvalidArgument("a loader's epoch counts from 0; " + std::to_string(epoch) + " is none");
  state_->place->go_to(epoch, 0);
}

LoaderState LoaderCore::state() const {
  check_place();
  return state_of(*state_->place, state_->host->steps());
}

void LoaderCore::load_state(const LoaderState& state) {
  check_place();
  take_state(*state_->place, state);
}

void LoaderCore::check_place() const {
  if (state_->place->is_known) return;
  throw InvalidArgument(
      "parameter servers deal the batches, and know which were trained on; begin the epoch anew, or prepare it with "
      "LoaderOptions::sharded and data of this worker's own");
}

std::optional<int64_t> LoaderCore::size() const noexcept {
  if (state_->is_stream) return std::nullopt;
  return state_->batches();
}

std::shared_ptr<void> LoaderCore::begin() {
  auto& s = *state_;
  s.end();
  const int64_t number = s.progress->begin_pass();
  s.progress->pass = nullptr;
  s.shared = nullptr;
  s.place->shared = nullptr;
  if (const auto left = std::exchange(s.dealt, nullptr)) left->leave();
  s.host->leave_passes();
  auto& place = *s.place;
  s.num_loads = place.num_loads;
  if (std::exchange(place.running, false)) ++place.epoch;
  // Where anything throws before the place says that it runs, the pass has not begun, and the next begin() begins it.
  if (s.is_dealt()) {
    s.dealt = s.host->deal(s.index, place.epoch, s.batches());
    s.progress->pass = s.dealt;
  }
  if (s.is_shared()) {
    s.shared = s.host->share(s.index, place.epoch, s.sizes_in_turn());
    s.shared->skip(place.to_skip);
    s.progress->pass = s.shared;
  }
  s.next = s.is_stream ? s.pass_over_stream(place.to_skip) : std::min(place.to_skip, s.batches());
  // Its own pass: the place may be sent elsewhere while readers read.
  s.reads = std::make_unique<ReadAhead>(
      static_cast<size_t>(s.options.workers),
      [&s, shared = s.shared, order = s.order_of_pass()](size_t thread, int64_t number) {
        return s.read(thread, shared ? State::shared_task_of(*shared, order, number) : s.task_of(order, number));
      });
  place.running = true;
  place.left_at = std::nullopt;
  place.yielded = std::exchange(place.to_skip, 0);
  place.shared = s.shared;
  auto hold = std::make_shared<PassHold>(number, s.progress, s.place, s.host);
  if (s.progress->pass) hold->of_pass = s.progress->pass->hold();
  s.ended = false;
  s.go_on();
  return hold;
}

bool LoaderCore::advance(const std::shared_ptr<void>& pass_of_loop) {
  auto& s = *state_;
  if (static_cast<const PassHold*>(pass_of_loop.get())->number != s.progress->passes) {
    throw InvalidArgument(
        "another loop over this loader has begun since, which ended this one; prepare a loader for each of both loops");
  }
  const auto pass = s.progress->pass;
  s.progress->at_end = false;
  s.current = nullptr;
  if (s.ended) return false;
  if (s.place->num_loads != s.num_loads) {
    s.end();
    throw InvalidArgument("the loader was loaded while a loop over it ran; begin a new loop");
  }
  s.look_ahead();
  if (pass) {
    pass->done();
    while (!s.more_ahead && pass->wait_for_more()) {
      s.is_ahead = false;
      s.look_ahead();
    }
  }
  if (s.ahead.error) {
    const auto error = std::exchange(s.ahead.error, nullptr);
    const bool is_of_a_batch = s.ahead.number >= 0;
    if (pass && is_of_a_batch) pass->lost(s.ahead.number);
    if (is_of_a_batch && s.goes_on_after_errors()) {
      ++s.place->yielded;  // who goes on from here does so behind it
      s.go_on();
    } else {
      s.end();
    }
    std::rethrow_exception(error);
  }
  if (!s.more_ahead) {
    s.end();
    s.progress->note_passed_end();
    if (s.place->running) ++s.place->epoch;
    s.place->running = false;
    return false;
  }
  s.current = std::move(s.ahead.parts);
  ++s.place->yielded;
  if (pass) pass->yielded(s.ahead.number);
  s.go_on();
  s.progress->note_yield(s.is_last());
  return true;
}

int64_t LoaderCore::number() const noexcept { return state_->progress->yielded; }

std::shared_ptr<void> LoaderCore::take() { return std::exchange(state_->current, nullptr); }

}  // namespace muster::detail
