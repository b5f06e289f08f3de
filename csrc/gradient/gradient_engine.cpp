#include "gradient/gradient_engine.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "core/plain_memory.h"
#include "core/replica_context.h"
#include "device/kernel_dtype.h"
#include "device/kernel_status.h"
#include "device/segments.h"
#include "gradient/sparse_sum.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/kernels.h"

namespace muster {

namespace {

// A complex parameter lies in its bucket as real and imaginary parts.
ParameterSpec spec_of(const NamedParameter& parameter) {
  const auto tensor = as_real(parameter.tensor.detach());
  return {parameter.name, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

int64_t num_reals(const at::Tensor& tensor) { return tensor.numel() * (tensor.is_complex() ? 2 : 1); }

// Strides of dimensions of size 1 carry no meaning and differ between equal layouts.
bool same_memory_order(const at::Tensor& tensor, const std::vector<int64_t>& strides) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != strides[static_cast<size_t>(d)]) return false;
  }
  return true;
}

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

// What `item` packs, but for a run.
void append_without(std::vector<kernels::PackItem>& items, const kernels::PackItem& item, const Run& run) {
  const size_t size = kernels::size_of(item.source_dtype);
  const auto append = [&](size_t first, size_t n) {
    if (n == 0) return;
    items.push_back({static_cast<const std::byte*>(item.source) + first * size, item.source_dtype,
                     static_cast<std::byte*>(item.destination) + first * size, n});
  };
  const auto begin = static_cast<size_t>(run.begin);
  const auto end = begin + static_cast<size_t>(run.count);
  append(0, begin);
  append(end, item.n - end);
}

}  // namespace

struct GradientEngine::ParameterState {
  int fires = 0;            // gradients that came in this micro-batch
  int expected_fires = 0;   // learned in the first micro-batch that has any, once the order is; 0: not yet
  bool ready = false;       // its fires are complete in this micro-batch
  bool packed = false;      // what came in this micro-batch is in the bucket
  bool is_sole = false;     // nobody else has the memory of its gradient
  bool dense_used = false;  // in this window
  bool sparse_used = false;
};

struct GradientEngine::BucketState {
  at::Tensor sums;
  at::Tensor wire;              // what travels instead, in less precision; undefined where the sums do
  std::vector<int> parameters;  // engine indices
  size_t pending = 0;
  bool packed = false;
  // On a streamed device:
  DeviceSegments<kernels::cuda::PackSlot> slots;
  kernels::cuda::PackPlan plan{};
};

// Runs before a gradient is added to `.grad`, in whichever replica's backward it comes.
struct GradientEngine::NeighbourHook final : torch::autograd::FunctionPreHook {
  NeighbourHook(const GradientEngine& owner, size_t index) : engine(owner), parameter(index) {}

  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& gradients) override {
    const auto context = current_replica();
    if (context && context->strategy == engine.options_.strategy && context->replica != engine.options_.replica) {
      throw InvalidArgument("parameter '" + engine.parameters_[parameter].name + "' of replica " +
                            std::to_string(engine.options_.replica) + " got a gradient in the step of replica " +
                            std::to_string(context->replica) +
                            "; use the module that prepare() returned inside the step, or what is read from it, not "
                            "the raw one");
    }
    return gradients;
  }

  const GradientEngine& engine;
  size_t parameter;
};

// Removes itself from the accumulator it watches.
struct GradientEngine::Hook {
  Hook(GradientEngine& engine, size_t parameter)
      : accumulator(torch::autograd::impl::grad_accumulator(engine.parameters_[parameter].tensor)),
        key(accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
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
    : parameters_(std::move(parameters)),
      communicator_(std::move(communicator)),
      options_(options),
      layout_index_(parameters_.size()),
      states_(parameters_.size()),
      slot_views_(parameters_.size()),
      sparse_(parameters_.size()) {
  for (size_t p = 0; p < parameters_.size(); ++p) layout_index_[p] = parameters_[p].has_rows ? -1 : 0;
  build_layout({});
  make_hooks();
}

// A leaf's gradients come on the stream that was current when its accumulator was made.
void GradientEngine::make_hooks() {
  hooks_.clear();
  hooks_.reserve(parameters_.size());
  hook_stream_ = current_streams({communicator_->device()}).front();
  for (size_t p = 0; p < parameters_.size(); ++p) hooks_.push_back(std::make_unique<Hook>(*this, p));
}

GradientEngine::~GradientEngine() = default;

// `order` holds engine indices; empty means reverse registration order.
void GradientEngine::build_layout(const std::vector<int>& order) {
  std::vector<ParameterSpec> specs;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (layout_index_[p] < 0) continue;
    layout_index_[p] = static_cast<int>(specs.size());
    specs.push_back(spec_of(parameters_[p]));
  }
  std::vector<int> layout_order;
  for (int p : order) {
    if (layout_index_[static_cast<size_t>(p)] >= 0) layout_order.push_back(layout_index_[static_cast<size_t>(p)]);
  }
  layout_ = FlatLayout(std::move(specs), std::move(layout_order), options_.bucket_bytes, options_.first_bucket_bytes,
                       options_.last_bucket_bytes);
  allocated_ = false;
}

void GradientEngine::verify_layouts() {
  auto digest = at::zeros({1}, at::kLong);
  digest.data_ptr<int64_t>()[0] = static_cast<int64_t>(layout_.digest());
  auto work = control().all_gather(digest);
  work.wait();
  const auto digests = work.outputs();
  const auto mine = digest.data_ptr<int64_t>()[0];
  const bool equal = std::all_of(digests.begin(), digests.end(),
                                 [&](const at::Tensor& d) { return d.const_data_ptr<int64_t>()[0] == mine; });
  if (equal) return;

  std::string names;
  for (const auto& parameter : layout_.parameters()) names += parameter.name + '\n';
  auto bytes = at::zeros({static_cast<int64_t>(names.size())}, at::kByte);
  std::copy(names.begin(), names.end(), bytes.data_ptr<uint8_t>());
  work = control().all_gather(bytes);
  work.wait();
  const auto texts = work.outputs();
  for (size_t r = 0; r < texts.size(); ++r) {
    const auto* first = texts[r].const_data_ptr<uint8_t>();
    const std::string theirs(first, first + texts[r].numel());
    if (theirs == names) continue;
    const auto [here, there] = std::mismatch(names.begin(), names.end(), theirs.begin(), theirs.end());
    const auto line = [](const std::string& text, std::string::const_iterator at) {
      const auto begin = text.rfind('\n', static_cast<size_t>(std::max<ptrdiff_t>(at - text.begin() - 1, 0)));
      const size_t start = at == text.begin() || begin == std::string::npos ? 0 : begin + 1;
      const auto name = text.substr(start, text.find('\n', start) - start);
      return name.empty() ? std::string("nothing") : "'" + name + "'";
    };
    throw LayoutMismatch("replica " + std::to_string(communicator_->rank()) + " trains parameter " + line(names, here) +
                         " where replica " + std::to_string(r) + " trains " + line(theirs, there) +
                         "; make requires_grad and the optimizer's parameters equal on all ranks");
  }
  throw LayoutMismatch("replica " + std::to_string(communicator_->rank()) +
                       ": shapes, dtypes or bucket_bytes of the trainable parameters differ between ranks; build the "
                       "same model with the same options everywhere");
}

void GradientEngine::allocate_buckets() {
  verify_layouts();
  owners_.reset();
  memory_.reset();
  buckets_.clear();
  for (const auto& spec : layout_.buckets()) {
    BucketState bucket;
    const auto allocate = [&](at::ScalarType dtype) { return communicator_->allocate(spec.numel, dtype); };
    if (options_.wire && spec.dtype == at::kFloat) {
      bucket.wire = allocate(*options_.wire);
      bucket.sums = at::zeros({spec.numel}, bucket.wire.options().dtype(spec.dtype));
    } else {
      bucket.sums = allocate(spec.dtype);
    }
    buckets_.push_back(std::move(bucket));
  }
  for (size_t p = 0; p < parameters_.size(); ++p) {
    slot_views_[p].reset();
    if (layout_index_[p] < 0) continue;
    const auto& slot = layout_.slots()[static_cast<size_t>(layout_index_[p])];
    auto& bucket = buckets_[static_cast<size_t>(slot.bucket)];
    const auto& sizes = layout_.parameters()[static_cast<size_t>(layout_index_[p])].sizes;
    const auto view = bucket.sums.as_strided(sizes, slot.strides, slot.offset);
    // As `.grad` no view of real numbers, which torch.compile cannot repeat.
    slot_views_[p] = parameters_[p].tensor.is_complex() ? at::view_as_complex(view).variable_data() : view;
  }
  std::vector<int> engine_index;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (layout_index_[p] >= 0) engine_index.push_back(static_cast<int>(p));
  }
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (int l : layout_.buckets()[b].parameters) {
      buckets_[b].parameters.push_back(engine_index[static_cast<size_t>(l)]);
    }
  }
  if (is_streamed(communicator_->device())) {
    for (auto& bucket : buckets_) plan_on_device(bucket);
  }
  if (OwnerReduction::is_possible(*communicator_)) {
    std::vector<int64_t> numels;
    for (const auto& parameter : parameters_) numels.push_back(num_reals(parameter.tensor));
    std::vector<OwnerReduction::Bucket> buckets;
    for (const auto& bucket : buckets_) {
      buckets.push_back({bucket.wire.defined() ? bucket.wire : bucket.sums, bucket.sums, bucket.parameters});
    }
    owners_ = std::make_unique<OwnerReduction>(*communicator_, layout_, numels, layout_index_, buckets,
                                               options_.least_lent_bytes, options_.norm_type);
    std::vector<size_t> bytes;
    for (size_t p = 0; p < parameters_.size(); ++p) {
      const size_t size = parameters_[p].tensor.nbytes();
      if (layout_index_[p] >= 0 && size >= options_.least_lent_bytes) bytes.push_back(size);
    }
    memory_ = std::make_unique<GradientMemory>(communicator_, bytes);
  }
  allocated_ = true;
}

void GradientEngine::open_window() {
  if (current_streams({communicator_->device()}).front() != hook_stream_) make_hooks();
  if (!next_order_.empty()) build_layout(std::exchange(next_order_, {}));
  for (auto& state : states_) state.dense_used = state.sparse_used = false;
  for (auto& sparse : sparse_) sparse.reset();
  if (!learned_) arrivals_.clear();
  first_non_finite_ = -1;
  next_launch_ = 0;
  works_.clear();
  if (owners_) owners_->open_window();
  if (!allocated_) allocate_buckets();
}

void GradientEngine::begin(const MicroBatch& micro_batch) {
  micro_batch_ = micro_batch;
  stream_ = current_streams({communicator_->device()}).front();
  clear_gradients();
  for (auto& state : states_) {
    state.fires = 0;
    state.ready = state.packed = state.is_sole = false;
  }
  for (auto& bucket : buckets_) {
    bucket.pending = bucket.parameters.size();
    bucket.packed = false;
  }
  abandoned_ = false;
  active_ = true;
}

bool GradientEngine::watches(size_t parameter) const {
  return torch::autograd::impl::try_get_grad_accumulator(parameters_[parameter].tensor) ==
         hooks_[parameter]->accumulator;
}

void GradientEngine::clear_gradients() noexcept {
  for (auto& parameter : parameters_) parameter.tensor.mutable_grad().reset();
}

void GradientEngine::keep_error(std::exception_ptr error) noexcept {
  if (!error_) error_ = std::move(error);
}

void GradientEngine::on_gradient(size_t p, const std::vector<at::Tensor>& handed_over) {
  const auto context = current_replica();
  if (!context || context->strategy != options_.strategy) return;
  if (!active_) {
    parameters_[p].tensor.mutable_grad().reset();
    if (ignored_) return;
    throw InvalidArgument("backward() was called inside the step function (parameter '" + parameters_[p].name +
                          "' got a gradient); return the loss instead: step() runs backward itself");
  }
  const auto& gradient = parameters_[p].tensor.mutable_grad();
  join_stream(gradient);
  const StreamScope scope(stream_);
  auto& state = states_[p];
  ++state.fires;
  if (state.fires == 1 && !learned_ && micro_batch_.first) arrivals_.push_back(static_cast<int>(p));
  if (gradient.is_sparse() || layout_index_[p] < 0) {
    take_sparse(p);
  } else if (micro_batch_.to_owners && gradient.defined() && gradient.nbytes() >= options_.least_lent_bytes) {
    state.is_sole = is_sole_owner(gradient, handed_over);
  }
  // How many come is not known before the first micro-batch in which this replica has any: others may have had theirs
  // in a window in which its part was empty.
  if (!learned_ || layout_index_[p] < 0 || state.expected_fires == 0 || state.fires < state.expected_fires) return;

  auto& bucket = buckets_[static_cast<size_t>(layout_.slots()[static_cast<size_t>(layout_index_[p])].bucket)];
  if (state.ready) {
    state.expected_fires = state.fires;
    if (!bucket.packed) return;
    if (micro_batch_.last && static_cast<size_t>(&bucket - buckets_.data()) < next_launch_) {
      parameters_[p].tensor.mutable_grad().reset();
      throw LayoutMismatch("replica " + std::to_string(options_.replica) + ": gradient number " +
                           std::to_string(state.fires) + " of parameter '" + parameters_[p].name +
                           "' came after its bucket had been reduced with " + std::to_string(state.fires - 1) +
                           "; the window is dropped, and the next one waits for " + std::to_string(state.fires));
    }
    pack_bucket(bucket);
    return;
  }
  state.ready = true;
  if (--bucket.pending == 0) {
    pack_bucket(bucket);
    if (micro_batch_.last && options_.overlap && micro_batch_.overlaps) launch_ready();
  }
}

void GradientEngine::take_sparse(size_t p) {
  const auto taken = std::exchange(parameters_[p].tensor.mutable_grad(), at::Tensor());
  if (abandoned_ || !micro_batch_.contributes) return;
  states_[p].sparse_used = true;
  sparse_[p] = add_sparse(sparse_[p], taken.is_sparse() ? taken : in_plain_memory(taken).to_sparse(1), factor());
}

// 0-dim, where the parameters are; undefined for 1.
at::Tensor GradientEngine::factor() const {
  const auto options = at::TensorOptions(at::kDouble);
  if (micro_batch_.gate == nullptr) {
    return micro_batch_.factor == 1 ? at::Tensor() : at::scalar_tensor(micro_batch_.factor, options);
  }
  return at::from_blob(const_cast<double*>(micro_batch_.gate), {}, options.device(communicator_->device()));
}

// Whether kernels may read a gradient where it is: as its slot has it.
bool GradientEngine::is_arranged(size_t p, const at::Tensor& gradient) const {
  const auto& slot = layout_.slots()[static_cast<size_t>(layout_index_[p])];
  return gradient.layout() == at::kStrided && !gradient.is_complex() && !is_lazy(gradient) &&
         gradient.scalar_type() == parameters_[p].tensor.scalar_type() && same_memory_order(gradient, slot.strides);
}

// Rare: autograd keeps gradients in the parameter's own order.
at::Tensor GradientEngine::arranged(size_t p, const at::Tensor& gradient) const {
  const auto& strides = layout_.slots()[static_cast<size_t>(layout_index_[p])].strides;
  const auto dense = gradient.detach().to_dense().to(parameters_[p].tensor.scalar_type());
  auto real = as_real(in_plain_memory(dense));
  if (same_memory_order(real, strides)) return real;
  return at::empty_strided(real.sizes(), strides, real.options()).copy_(real);
}

// What comes on another stream is waited for there, and lives until it is packed.
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

void GradientEngine::pack_bucket(BucketState& bucket) {
  if (is_streamed(communicator_->device())) {
    pack_on_device(bucket);
  } else {
    pack(bucket);
  }
  bucket.packed = true;
}

void GradientEngine::plan_on_device(BucketState& bucket) {
  std::vector<kernels::cuda::PackSlot> slots;
  for (int index : bucket.parameters) {
    const auto p = static_cast<size_t>(index);
    const auto& slot = layout_.slots()[static_cast<size_t>(layout_index_[p])];
    const auto& tensor = parameters_[p].tensor;
    slots.push_back({static_cast<uint64_t>(slot.offset), static_cast<uint64_t>(num_reals(tensor)),
                     kernel_dtype(c10::toRealValueType(tensor.scalar_type()))});
  }
  bucket.slots.follow(slots, communicator_->device());
  bucket.plan = {bucket.slots.items(), bucket.slots.num_items(), bucket.slots.chunks(), bucket.slots.num_chunks(),
                 kernel_dtype(bucket.sums.scalar_type())};
}

// All parameters of a bucket are packed together: again where one's gradient came in two parts.
void GradientEngine::pack_on_device(BucketState& bucket) {
  const bool drop = abandoned_ || !micro_batch_.contributes;
  std::vector<const void*> sources(bucket.parameters.size());
  std::vector<at::Tensor> kept;
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto p = static_cast<size_t>(bucket.parameters[i]);
    const auto& tensor = parameters_[p].tensor;
    auto gradient = std::exchange(tensor.mutable_grad(), at::Tensor());
    states_[p].packed = true;
    if (!gradient.defined() || drop) continue;
    states_[p].dense_used = true;
    if (!is_arranged(p, gradient)) gradient = arranged(p, gradient);
    sources[i] = gradient.const_data_ptr();
    kept.push_back(std::move(gradient));
  }
  const bool accumulate = !micro_batch_.first || bucket.packed;
  const auto status = kernels::cuda::pack(bucket.plan, sources.data(), bucket.sums.mutable_data_ptr(), accumulate, 1,
                                          micro_batch_.gate, stream_handle(communicator_->device()));
  check_kernel(status, "packing gradients");
}

void GradientEngine::pack(BucketState& bucket) {
  std::vector<kernels::PackItem> fresh;
  std::vector<kernels::PackItem> added;
  fresh.reserve(bucket.parameters.size());
  const auto dtype = bucket.sums.scalar_type();
  auto* const sums = static_cast<std::byte*>(bucket.sums.mutable_data_ptr());
  const bool drop = abandoned_ || !micro_batch_.contributes;
  const bool lends = micro_batch_.to_owners && !micro_batch_.locate_non_finite && !bucket.wire.defined();
  std::vector<at::Tensor> kept;
  for (int index : bucket.parameters) {
    const auto p = static_cast<size_t>(index);
    auto& state = states_[p];
    // A parameter packed earlier in this micro-batch only adds what came since.
    const bool adds = !micro_batch_.first || state.packed;
    state.packed = true;
    if (micro_batch_.to_owners) take_back(p);
    const auto& gradient = parameters_[p].tensor.mutable_grad();
    auto& items = adds ? added : fresh;
    // Of a slot's view no more than needed: a cache has few of the many small tensors.
    const auto& slot = layout_.slots()[static_cast<size_t>(layout_index_[p])];
    kernels::PackItem item{nullptr, kernel_dtype(dtype),
                           sums + static_cast<size_t>(slot.offset) * c10::elementSize(dtype),
                           static_cast<size_t>(slot.numel)};
    if (gradient.defined() && !drop) {
      state.dense_used = true;
      const bool is_read = is_arranged(p, gradient);
      if (!is_read) kept.push_back(arranged(p, gradient));
      const auto& source = is_read ? gradient : kept.back();
      item.source = source.const_data_ptr();
      item.source_dtype = kernel_dtype(source.scalar_type());
      if (is_read && lends && !adds && source.scalar_type() == dtype) {
        if (!owners_->lend(p, source, state.is_sole, micro_batch_.factor))
          append_without(fresh, item, owners_->run(p, communicator_->rank()));
        continue;
      }
    }
    items.push_back(item);
  }
  kernels::pack(fresh.data(), fresh.size(), /*accumulate=*/false, micro_batch_.factor);
  kernels::pack(added.data(), added.size(), /*accumulate=*/true, micro_batch_.factor);
  for (int index : bucket.parameters) parameters_[static_cast<size_t>(index)].tensor.mutable_grad().reset();
}

// What was lent of a parameter goes into its bucket.
void GradientEngine::take_back(size_t p) {
  const auto lent = owners_->take_back(p);
  if (!lent) return;
  const auto from = elements_of(lent->gradient, lent->run);
  const kernels::PackItem item{from.const_data_ptr(), kernel_dtype(from.scalar_type()),
                               elements_of(slot_views_[p], lent->run).mutable_data_ptr(),
                               static_cast<size_t>(lent->run.count)};
  kernels::pack(&item, 1, /*accumulate=*/false, lent->factor);
}

void GradientEngine::locate_non_finite(const BucketState& bucket) {
  for (int p : bucket.parameters) {
    if (first_non_finite_ >= 0 && first_non_finite_ < p) continue;
    if (!at::isfinite(slot_views_[static_cast<size_t>(p)]).all().item<bool>()) first_non_finite_ = p;
  }
}

void GradientEngine::launch_ready() {
  while (next_launch_ < buckets_.size() && buckets_[next_launch_].packed) {
    auto& bucket = buckets_[next_launch_];
    if (micro_batch_.locate_non_finite) locate_non_finite(bucket);
    const size_t b = next_launch_++;
    ++launches_;
    if (options_.deliver) {
      deliver(bucket);
    } else {
      works_.push_back(launch(b));
    }
  }
  for (auto& work : works_) {
    if (!work.done()) break;
  }
}

void GradientEngine::deliver(const BucketState& bucket) const {
  for (const int index : bucket.parameters) {
    const auto p = static_cast<size_t>(index);
    options_.deliver(p, slot_views_[p]);
  }
}

comm::Work GradientEngine::launch(size_t b) {
  auto& bucket = buckets_[b];
  if (bucket.wire.defined()) fill_wire(bucket);
  if (micro_batch_.to_owners) return owners_->reduce(b);
  return communicator_->all_reduce(bucket.wire.defined() ? bucket.wire : bucket.sums, ReduceOp::sum,
                                   layout_.digest() + b, options_.receive);
}

void GradientEngine::fill_wire(BucketState& bucket) {
  if (!bucket.sums.device().is_cpu()) {
    bucket.wire.copy_(bucket.sums);
    return;
  }
  kernels::narrow(kernel_dtype(bucket.wire.scalar_type()), bucket.wire.mutable_data_ptr(),
                  bucket.sums.const_data_ptr<float>(), static_cast<size_t>(bucket.sums.numel()));
}

void GradientEngine::empty_wire(BucketState& bucket) {
  if (!bucket.sums.device().is_cpu()) {
    bucket.sums.copy_(bucket.wire);
    return;
  }
  const kernels::PackItem item{bucket.wire.const_data_ptr(), kernel_dtype(bucket.wire.scalar_type()),
                               bucket.sums.mutable_data_ptr(), static_cast<size_t>(bucket.sums.numel())};
  kernels::pack(&item, 1, /*accumulate=*/false);
}

void GradientEngine::abandon() noexcept { abandoned_ = true; }

void GradientEngine::flush() {
  active_ = false;
  const StreamScope scope(stream_);
  for (auto& bucket : buckets_) {
    if (bucket.packed) continue;
    try {
      pack_bucket(bucket);
    } catch (...) {  // peers wait for it all the same
      keep_error(std::current_exception());
      bucket.packed = true;
    }
  }
  for (size_t p = 0; p < parameters_.size(); ++p) {
    auto& state = states_[p];
    const bool counts = !learned_ || (state.expected_fires == 0 && !abandoned_);
    if (counts) state.expected_fires = std::max(state.expected_fires, state.fires);
  }
  if (micro_batch_.last) launch_ready();
  clear_gradients();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void GradientEngine::wait() {
  if (works_.empty()) return;
  for (auto& work : works_) work.wait();
  works_.clear();
  if (micro_batch_.to_owners || !options_.receive) return;
  const StreamScope scope(stream_);
  for (auto& bucket : buckets_) {
    if (bucket.wire.defined()) empty_wire(bucket);
  }
}

void GradientEngine::release_gradients() noexcept {
  if (owners_) owners_->release();
}

const at::Tensor& GradientEngine::slot(size_t p) const noexcept {
  const auto* const in_gradient = owners_ ? &owners_->sum_in(p) : nullptr;
  return in_gradient != nullptr && in_gradient->defined() ? *in_gradient : slot_views_[p];
}

void GradientEngine::add_counts(double* counts) const noexcept {
  for (size_t p = 0; p < states_.size(); ++p) {
    counts[p] += states_[p].dense_used ? 1.0 : 0.0;
    counts[states_.size() + p] += states_[p].sparse_used ? 1.0 : 0.0;
  }
}

void GradientEngine::reduce_sparse(const double* counts) {
  bool changes_owned = false;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (counts[parameters_.size() + p] <= 0) continue;
    auto sum = sum_sparse_over_ranks(*communicator_, sparse_[p], parameters_[p].tensor);
    if (counts[p] > 0) {
      slot(p).add_(sum);
      sparse_[p].reset();
      if (micro_batch_.to_owners) owners_->take_stats(p, as_real(slot(p)));
      changes_owned |= micro_batch_.to_owners;
    } else {
      sparse_[p] = std::move(sum);
    }
  }
  if (changes_owned) communicator_->barrier().wait();
}

void GradientEngine::learn_order(const double* counts) {
  if (learned_) return;
  std::vector<bool> arrived(parameters_.size(), false);
  for (int p : arrivals_) arrived[static_cast<size_t>(p)] = true;
  for (size_t p = parameters_.size(); p-- > 0;) {
    if (!arrived[p]) arrivals_.push_back(static_cast<int>(p));
  }
  auto order = at::zeros({static_cast<int64_t>(parameters_.size())}, at::kLong);
  std::copy(arrivals_.begin(), arrivals_.end(), order.data_ptr<int64_t>());
  control().broadcast(order, 0).wait();
  const auto* first = order.const_data_ptr<int64_t>();
  next_order_.assign(first, first + order.numel());
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const bool is_sparse_only = counts[p] <= 0 && counts[parameters_.size() + p] > 0;
    if (is_sparse_only && !options_.deliver) layout_index_[p] = -1;
  }
  arrivals_.clear();
  learned_ = true;
}

}  // namespace muster
