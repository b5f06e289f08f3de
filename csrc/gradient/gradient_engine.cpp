#include "gradient/gradient_engine.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "core/replica_context.h"
#include "core/sparse_rows.h"
#include "gradient/host_pack.h"
#include "gradient/post_hook.h"
#include "gradient/sparse_sum.h"

namespace muster {

namespace {

// Whether nobody but its parameter will have a gradient's memory once autograd lets go of what the accumulator was
// handed: that, and where it is a view (of a transposed weight's gradient, say) its base.
bool is_sole_owner(const at::Tensor& gradient, const std::vector<at::Tensor>& handed_over) {
  if (gradient.layout() != at::kStrided || gradient.use_count() != 1) return false;
  size_t users = gradient.storage().use_count();
  for (const auto& tensor : handed_over) {
    if (!tensor.defined() || !tensor.is_alias_of(gradient)) continue;
    if (tensor.use_count() != 1) return false;
    --users;
    if (tensor.is_view() && tensor._base().use_count() == 1) --users;
  }
  return users == 1;
}

}  // namespace

// Runs before a gradient is added to `.grad`, in whichever replica's backward it comes.
struct GradientEngine::NeighbourHook final : torch::autograd::FunctionPreHook {
  NeighbourHook(const GradientEngine& owner, size_t index) : engine(owner), parameter(index) {}

  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& gradients) override {
    const auto context = current_replica();
    if (context && context->strategy == engine.options_.strategy && context->replica != engine.options_.replica) {
      throw InvalidArgument("parameter '" + engine.parameters()[parameter].name + "' of replica " +
                            std::to_string(engine.options_.replica) + " got a gradient in the step of replica " +
                            std::to_string(context->replica) +
                            "; use the module that prepare() returned inside the step, or what is read from it, not "
                            "the raw one, nor in a thread of your own; of a module that holds itself, in a lambda say, "
                            "prepare a factory");
    }
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

  const GradientEngine& engine;
  size_t parameter;
};

// Removes itself from the accumulator it watches.
struct GradientEngine::Hook {
  Hook(GradientEngine& engine, size_t parameter)
      : accumulator(torch::autograd::impl::grad_accumulator(engine.parameters()[parameter].tensor)),
        key(accumulator->add_post_hook(make_post_hook(
            [&engine, parameter](const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
              try {
                engine.on_gradient(parameter, inputs);
              } catch (...) {
                engine.keep_error(std::current_exception());
              }
              return outputs;
            }))) {
    if (!engine.options_.has_neighbours) return;
    auto hook = std::make_unique<NeighbourHook>(engine, parameter);
    neighbour = hook.get();
    accumulator->add_pre_hook(std::move(hook));
  }
  ~Hook() {
    accumulator->del_post_hook(key);
    std::erase_if(accumulator->pre_hooks(), [this](const auto& hook) { return hook.get() == neighbour; });
  }
  Hook(const Hook&) = delete;
  Hook& operator=(const Hook&) = delete;

  // The pointer's type differs between torch versions.
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
  uintptr_t key;
  const torch::autograd::FunctionPreHook* neighbour = nullptr;
};

GradientEngine::GradientEngine(std::vector<NamedParameter> parameters, comm::CommunicatorPtr communicator,
                               const GradientEngineOptions& options)
    : communicator_(std::move(communicator)),
      options_(options),
      buckets_(std::move(parameters)),
      states_(buckets_.parameters().size()) {
  lay_out({});
  make_hooks();
}

// A leaf's gradients come on the stream that was current when its accumulator was made.
void GradientEngine::make_hooks() {
  hooks_.clear();
  hooks_.reserve(states_.size());
  hook_stream_ = current_streams({communicator_->device()}).front();
  for (size_t p = 0; p < states_.size(); ++p) hooks_.push_back(std::make_unique<Hook>(*this, p));
}

GradientEngine::~GradientEngine() = default;

void GradientEngine::lay_out(const std::vector<int>& order) {
  if (!buckets_.lay_out(order, options_.bucket_bytes, options_.first_bucket_bytes, options_.last_bucket_bytes)) return;
  if (reductions_) clear_gradients();  // which may be views of the buckets
  bucket_states_.clear();
  reductions_.reset();
  device_pack_.reset();
}

void GradientEngine::allocate_buckets() {
  check_layouts_agree(control(), buckets_.layout());
  buckets_.allocate(*communicator_, options_.wire);
  if (is_streamed(communicator_->device())) {
    device_pack_ = std::make_unique<DevicePack>(buckets_, communicator_->device());
  }
  reductions_ = std::make_unique<Reductions>(communicator_, buckets_, options_.make_reduction, options_.receive,
                                             options_.least_lent_bytes, options_.norm_type);
  bucket_states_.assign(buckets_.size(), {});
}

void GradientEngine::open_window() {
  if (current_streams({communicator_->device()}).front() != hook_stream_) make_hooks();
  if (const auto order = order_.take(); !order.empty()) lay_out(order);
  order_.open_window();
  for (auto& state : states_) {
    state.dense_used = state.sparse_used = false;
    state.sparse.reset();
  }
  first_non_finite_ = -1;
  launched_.is_held = false;
  launched_.next = 0;
  launched_.works.clear();
  if (reductions_) reductions_->open_window();
  if (!reductions_) allocate_buckets();
}

void GradientEngine::begin(const MicroBatch& micro_batch) {
  micro_batch_ = micro_batch;
  stream_ = current_streams({communicator_->device()}).front();
  clear_gradients();
  for (auto& state : states_) {
    state.fires = 0;
    state.ready = state.packed = state.is_sole = false;
  }
  for (size_t b = 0; b < bucket_states_.size(); ++b) bucket_states_[b] = {buckets_[b].parameters.size(), false};
  abandoned_ = false;
  active_ = true;
  if (!reductions_) return;
  reductions_->choose(micro_batch.to_owners);
  if (micro_batch.shards) reductions_->choose_shards(micro_batch.shards);
}

bool GradientEngine::watches(size_t parameter) const {
  return torch::autograd::impl::try_get_grad_accumulator(parameters()[parameter].tensor) ==
         hooks_[parameter]->accumulator;
}

void GradientEngine::clear_gradients() noexcept {
  for (const auto& parameter : parameters()) parameter.tensor.mutable_grad().reset();
}

void GradientEngine::set_ignored(bool ignored, const std::vector<size_t>& left) {
  ignored_ = ignored;
  left_.clear();
  if (!left.empty()) left_.resize(parameters().size());
  for (const size_t p : left) left_[p] = true;
}

void GradientEngine::keep_error(std::exception_ptr error) noexcept {
  if (!error_) error_ = std::move(error);
}

void GradientEngine::on_gradient(size_t p, const std::vector<at::Tensor>& handed_over) {
  const auto context = current_replica();
  if (!context || context->strategy != options_.strategy) return;
  if (!active_) {
    if (ignored_ && !left_.empty() && left_[p]) return;
    parameters()[p].tensor.mutable_grad().reset();
    if (ignored_) return;
    if (context->is_in_run) {
      if (context->stray_gradient) return;
      context->stray_gradient = std::make_exception_ptr(InvalidArgument(
          "backward() was called inside run() (parameter '" + parameters()[p].name +
          "' got a gradient), and nothing takes gradients there; ask autograd.grad() for those of inputs, or call "
          "backward() outside of run()"));
      return;
    }
    throw InvalidArgument("backward() was called inside the step function (parameter '" + parameters()[p].name +
                          "' got a gradient); return the loss instead: step() runs backward itself");
  }
  const auto& gradient = parameters()[p].tensor.mutable_grad();
  join_stream(gradient);
  const StreamScope scope(stream_);
  auto& state = states_[p];
  ++state.fires;
  if (state.fires == 1 && !order_.is_learned() && micro_batch_.first) order_.note(p);
  if (gradient.is_sparse() || !buckets_.holds(p)) {
    take_sparse(p);
  } else if (reads_gradients() && gradient.defined() && gradient.nbytes() >= options_.least_lent_bytes) {
    state.is_sole = is_sole_owner(gradient, handed_over);
  }
  // How many come is not known before the first micro-batch in which this replica has any: others may have had theirs
  // in a window in which its part was empty.
  const bool is_known = order_.is_learned() && state.expected_fires > 0 && !bucket_states_.empty();
  if (!is_known || !buckets_.holds(p) || state.fires < state.expected_fires) return;

  const auto b = static_cast<size_t>(buckets_.slot(p).bucket);
  auto& bucket = bucket_states_[b];
  if (state.ready) {
    state.expected_fires = state.fires;
    if (!bucket.packed) return;
    if (micro_batch_.last && b < launched_.next) {
      parameters()[p].tensor.mutable_grad().reset();
      throw LayoutMismatch("replica " + std::to_string(options_.replica) + ": gradient number " +
                           std::to_string(state.fires) + " of parameter '" + parameters()[p].name +
                           "' came after its bucket had been reduced with " + std::to_string(state.fires - 1) +
                           "; the window is dropped, and the next one waits for " + std::to_string(state.fires));
    }
    pack(b);
    return;
  }
  state.ready = true;
  if (--bucket.pending == 0) {
    pack(b);
    if (micro_batch_.last && options_.overlap && !launched_.is_held) launch_ready();
  }
}

void GradientEngine::take_sparse(size_t p) {
  const auto taken = std::exchange(parameters()[p].tensor.mutable_grad(), at::Tensor());
  if (drops()) return;
  auto& state = states_[p];
  if (state.sparse.defined() && state.sparse.sizes() != taken.sizes()) {
    throw InvalidArgument("parameter '" + parameters()[p].name + "' has a sparse gradient of shape " +
                          c10::str(taken.sizes()) + ", and had one of shape " + c10::str(state.sparse.sizes()) +
                          " in the same window; give it another shape between windows");
  }
  state.sparse_used = true;
  const auto& tensor = parameters()[p].tensor;
  const auto rows = by_rows(taken);
  state.sparse = add_sparse(state.sparse,
                            tensor.is_complex() ? rows : rows.to(accumulation_dtype(tensor.scalar_type())), factor());
}

// 0-dim, where the parameters are; undefined for 1.
at::Tensor GradientEngine::factor() const {
  const auto options = at::TensorOptions(at::kDouble);
  if (micro_batch_.gate == nullptr) {
    return micro_batch_.factor == 1 ? at::Tensor() : at::scalar_tensor(micro_batch_.factor, options);
  }
  return at::from_blob(const_cast<double*>(micro_batch_.gate), {}, options.device(communicator_->device()));
}

// A gradient that comes on another stream is waited for there, and lives until it is packed.
void GradientEngine::join_stream(const at::Tensor& gradient) {
  if (!stream_ || !gradient.defined()) return;
  const auto current = current_streams({stream_->device()}).front();
  if (!current || *current == *stream_) return;
  order_streams(*current, *stream_);
  if (gradient.is_sparse()) {
    gradient._indices().record_stream(*stream_);
    gradient._values().record_stream(*stream_);
  } else {
    gradient.record_stream(*stream_);
  }
}

void GradientEngine::pack(size_t b) {
  const bool may_offer = !micro_batch_.locate_non_finite && reads_gradients();
  Packing packing{micro_batch_.first, drops(), may_offer, false, micro_batch_.factor, micro_batch_.gate};
  if (device_pack_) {
    // Of a window of one micro-batch nobody reads the sums before they travel.
    packing.to_wire = micro_batch_.first && micro_batch_.last && !micro_batch_.locate_non_finite &&
                      buckets_[b].wire.defined() && buckets_[b].wire.scalar_type() == at::kBFloat16;
    buckets_.set_wire_is_packed(b, packing.to_wire);
    device_pack_->pack(b, packing, /*again=*/bucket_states_[b].packed, states_);
  } else {
    pack_on_host(buckets_, b, packing, states_, reductions_->chosen());
  }
  bucket_states_[b].packed = true;
}

void GradientEngine::locate_non_finite(const Bucket& bucket) {
  for (int p : bucket.parameters) {
    if (first_non_finite_ >= 0 && first_non_finite_ < p) continue;
    if (!at::isfinite(buckets_.view(static_cast<size_t>(p))).all().item<bool>()) first_non_finite_ = p;
  }
}

void GradientEngine::launch_ready() {
  while (launched_.next < bucket_states_.size() && bucket_states_[launched_.next].packed) launch_next();
  poll_works();
}

void GradientEngine::launch_next() {
  if (micro_batch_.locate_non_finite) locate_non_finite(buckets_[launched_.next]);
  const size_t b = launched_.next++;
  ++launched_.count;
  launched_.works.push_back(reductions_->chosen().reduce(b));
}

void GradientEngine::poll_works() {
  for (auto& work : launched_.works) {
    if (!work.done()) break;
  }
}

int64_t GradientEngine::num_ready() const noexcept {
  size_t b = launched_.next;
  if (active_ && micro_batch_.last && options_.overlap) {
    while (b < bucket_states_.size() && bucket_states_[b].packed) ++b;
  }
  return static_cast<int64_t>(b);
}

void GradientEngine::issue(int64_t count) noexcept {
  const StreamScope scope(stream_);
  const auto end = static_cast<size_t>(std::min(count, num_ready()));
  try {
    while (launched_.next < end) launch_next();
    poll_works();
  } catch (...) {
    keep_error(std::current_exception());
  }
}

void GradientEngine::let_go() noexcept {
  issue(num_ready());
  launched_.is_held = false;
}

void GradientEngine::abandon() noexcept { abandoned_ = true; }

void GradientEngine::flush() {
  active_ = launched_.is_held = false;
  const StreamScope scope(stream_);
  for (size_t b = 0; b < bucket_states_.size(); ++b) {
    if (bucket_states_[b].packed) continue;
    try {
      pack(b);
    } catch (...) {  // peers wait for it all the same
      keep_error(std::current_exception());
      bucket_states_[b].packed = true;
    }
  }
  for (auto& state : states_) {
    const bool counts = !order_.is_learned() || (state.expected_fires == 0 && !abandoned_);
    if (counts) state.expected_fires = std::max(state.expected_fires, state.fires);
  }
  if (micro_batch_.last) launch_ready();
  clear_gradients();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void GradientEngine::wait() {
  if (launched_.works.empty()) return;
  for (auto& work : launched_.works) work.wait();
  launched_.works.clear();
  const StreamScope scope(stream_);
  reductions_->chosen().finish();
}

void GradientEngine::release_gradients() noexcept {
  if (reductions_) reductions_->chosen().release();
}

const at::Tensor& GradientEngine::slot(size_t p) const noexcept {
  if (!reductions_) return buckets_.view(p);
  const auto& in_gradient = reductions_->chosen().sum_of(p);
  return in_gradient.defined() ? in_gradient : buckets_.view(p);
}

void GradientEngine::add_counts(double* counts) const noexcept {
  for (size_t p = 0; p < states_.size(); ++p) {
    counts[p] += states_[p].dense_used ? 1.0 : 0.0;
    counts[states_.size() + p] += states_[p].sparse_used ? 1.0 : 0.0;
  }
}

void GradientEngine::reduce_sparse(const double* counts) {
  bool peers_read_change = false;
  for (size_t p = 0; p < states_.size(); ++p) {
    if (counts[states_.size() + p] <= 0) continue;
    auto& sparse = states_[p].sparse;
    auto sum = sum_sparse_over_ranks(*communicator_, sparse, parameters()[p].tensor);
    if (counts[p] > 0) {
      slot(p).add_(sum);
      sparse.reset();
      peers_read_change |= reductions_->chosen().note_changed(p, as_real(slot(p)));
    } else {
      sparse = std::move(sum);
    }
  }
  if (peers_read_change) communicator_->barrier().wait();
}

void GradientEngine::learn_order(const double* counts) {
  if (order_.is_learned()) return;
  order_.learn(control(), states_.size());
  for (size_t p = 0; p < states_.size(); ++p) {
    const bool is_sparse_only = counts[p] <= 0 && counts[states_.size() + p] > 0;
    if (is_sparse_only && !options_.keeps_sparse_slots) buckets_.leave_out(p);
  }
}

}  // namespace muster
