#include "window/parameter_registry.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>

#include "comm/text_exchange.h"
#include "core/lines.h"
#include "core/plain_memory.h"
#include "core/plain_text.h"
#include "device/device.h"
#include "embedding/row_source.h"
#include "muster/error.h"
#include "window/memory_check.h"
#include "window/packed_copy.h"

namespace muster {

namespace {

void describe(std::ostream& out, const char* kind, const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    out << kind << " '" << name << "' " << tensor.sizes() << ' ' << c10::toString(tensor.scalar_type()) << '\n';
  }
}

std::string describe(const ModuleTensors& module) {
  TextWriter out;
  describe(out, "parameter", module.parameters.front());
  describe(out, "buffer", module.buffers.front());
  return out.str();
}

void compare_over_workers(const std::string& mine, comm::Communicator& workers) {
  const auto texts = exchange_texts(workers, mine);
  for (size_t r = 1; r < texts.size(); ++r) {
    const auto difference = first_difference(texts[0], texts[r]);
    if (!difference) continue;
    throw LayoutMismatch("the models of the ranks differ: rank 0 has " + difference->first + ", rank " +
                         std::to_string(r) + " has " + difference->second +
                         "; build the same model on every rank before prepare()");
  }
}

// An expanded tensor cannot be written: it becomes a dense one.
void assign(const at::Tensor& tensor, const at::Tensor& values) {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    tensor.set_data(values.to(tensor.device()).contiguous());
  } else {
    tensor.copy_(values);
  }
}

void broadcast_values(const at::Tensor& tensor, comm::Communicator& workers) {
  if (workers.size() == 1 || tensor.numel() == 0 || is_row_stub(tensor)) return;
  const auto values = tensor.detach();
  if (values.is_non_overlapping_and_dense() && !is_lazy(values)) {
    workers.broadcast(as_real(values), 0).wait();
    return;
  }
  const auto packed = in_plain_memory(values).contiguous();
  workers.broadcast(as_real(packed), 0).wait();
  assign(tensor, packed);
}

// Of a later module's names: its number, or where the first module has such names itself ("1.weight" of a Sequential),
// a longer one.
std::string prefix_of(int number, const NamedTensors& parameters, const std::vector<std::string>& names) {
  if (number == 0) return {};
  const std::unordered_set<std::string> taken(names.begin(), names.end());
  auto prefix = std::to_string(number) + '.';
  while (std::any_of(parameters.begin(), parameters.end(),
                     [&](const auto& named) { return taken.contains(prefix + named.first); })) {
    prefix = "module " + prefix;
  }
  return prefix;
}

// Kernels are given its address.
void check_place(const char* kind, const std::string& name, const at::Tensor& tensor, c10::Device device) {
  if (tensor.device() == device) return;
  throw InvalidArgument(std::string(kind) + " '" + name + "' is on " + tensor.device().str() +
                        " since prepare(), and its replica on " + device.str() + "; move it back there");
}

}  // namespace

void ParameterRegistry::check_local(const ModuleTensors& module) const {
  std::unordered_set<const c10::TensorImpl*> leaves;
  for (const auto& [name, leaf] : module.parameters.front()) leaves.insert(leaf.unsafeGetTensorImpl());
  for (size_t r = 1; r < module.parameters.size(); ++r) {
    for (const auto& [name, parameter] : module.parameters[r]) {
      if (!leaves.contains(parameter.unsafeGetTensorImpl())) continue;
      throw InvalidArgument("parameter '" + name + "' is one tensor in the modules of replica 0 and replica " +
                            std::to_string(r) + "; the factory must build another module in each call");
    }
  }
  for (const auto* group : {&module.parameters, &module.buffers}) {
    for (size_t r = 0; r < group->size(); ++r) {
      for (const auto& [name, tensor] : (*group)[r]) {
        if (tensor.is_inference()) {  // it has no version counter, and takes part in no backward
          throw InvalidArgument("'" + name +
                                "' of the module was made in inference mode, so that steps cannot follow " +
                                "it; build the module outside of it (c10::InferenceMode, torch.inference_mode)");
        }
        if (tensor.layout() != at::kStrided) {
          throw InvalidArgument("'" + name + "' has layout " + c10::str(tensor.layout()) +
                                "; only strided parameters and buffers can be prepared");
        }
        const auto dtype = tensor.scalar_type();
        if (!at::isFloatingType(dtype) && !at::isComplexType(dtype) && !at::isIntegralType(dtype, true)) {
          throw InvalidArgument("'" + name + "' has dtype " + c10::toString(dtype) +
                                ", which replicas cannot agree on; keep it outside of the module's parameters and "
                                "buffers, or convert it to a floating, complex, integer or bool dtype");
        }
        if (group == &module.parameters && is_lazy(tensor)) {
          throw InvalidArgument("parameter '" + name +
                                "' is the conjugate or the negation of other memory, which optimizers cannot step; "
                                "build it from resolve_conj().resolve_neg() of that tensor");
        }
        if (tensor.device() != devices_[r]) {
          throw InvalidArgument("'" + name + "' is on " + tensor.device().str() + ", but this replica is on " +
                                devices_[r].str() + ": move the module with .to('" + devices_[r].str() + "') first");
        }
      }
    }
    TextWriter first;
    describe(first, "tensor", group->front());
    for (size_t r = 1; r < group->size(); ++r) {
      TextWriter other;
      describe(other, "tensor", (*group)[r]);
      const auto difference = first_difference(first.str(), other.str());
      if (!difference) continue;
      throw InvalidArgument("replica " + std::to_string(r) + " of a module has " + difference->second +
                            ", replica 0 has " + difference->first + "; the factory must build equal modules");
    }
  }
}

int ParameterRegistry::add(ModuleTensors module, comm::Communicator& workers) {
  check_local(module);
  std::vector<MemoryOwner> owners;
  for (size_t p = 0; p < names_.size(); ++p) owners.push_back({"parameter", names_[p], parameters_[0][p]});
  for (const auto& [name, tensor] : module.parameters.front()) owners.push_back({"parameter", name, tensor});
  for (const auto& [name, tensor] : module.buffers.front()) owners.push_back({"buffer", name, tensor});
  check_share_no_memory(owners);
  compare_over_workers(describe(module), workers);
  const int number = num_modules_++;
  const auto prefix = prefix_of(number, module.parameters.front(), names_);
  const size_t replicas = module.parameters.size();
  parameters_.resize(replicas);
  copied_versions_.resize(replicas);
  buffers_.resize(replicas);

  const at::NoGradGuard no_grad;
  for (size_t p = 0; p < module.parameters.front().size(); ++p) {
    const auto& [name, leaf] = module.parameters.front()[p];
    if (index_.contains(leaf.unsafeGetTensorImpl())) continue;  // shared with an earlier module
    broadcast_values(leaf, workers);
    const auto index = names_.size();
    index_[leaf.unsafeGetTensorImpl()] = static_cast<int>(index);
    names_.push_back(prefix + name);
    modules_.push_back(number);
    for (size_t r = 0; r < replicas; ++r) parameters_[r].push_back(module.parameters[r][p].second);
    share_with_replicas(index);
    note_agreed(index);
  }
  if (first_buffer_.empty()) first_buffer_.push_back(0);
  first_buffer_.push_back(first_buffer_.back() + module.buffers.front().size());
  for (size_t b = 0; b < module.buffers.front().size(); ++b) {
    const auto& [name, buffer] = module.buffers.front()[b];
    broadcast_values(buffer, workers);
    buffer_names_.push_back(prefix + name);
    prepared_sizes_.push_back(buffer.sizes().vec());
    for (size_t r = 0; r < replicas; ++r) {
      buffers_[r].push_back(module.buffers[r][b].second);
      if (r > 0) assign(module.buffers[r][b].second, buffer);
    }
  }
  return number;
}

void ParameterRegistry::share_with_replicas(size_t p) {
  const auto& leaf = parameters_[0][p];
  for (size_t r = 1; r < parameters_.size(); ++r) {
    if (!share_memory(devices_[r], devices_[0])) {
      copy_to_replica(r, {p});
      continue;
    }
    auto& replica = parameters_[r][p];
    replica.set_data(leaf.detach());
    torch::autograd::impl::set_version_counter(replica, torch::autograd::impl::version_counter(leaf));
  }
}

void ParameterRegistry::copy_to_replica(size_t r, const std::vector<size_t>& parameters) {
  auto& versions = copied_versions_[r];
  versions.resize(names_.size());
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (const size_t p : parameters) {
    const auto& leaf = parameters_[0][p];
    if (is_alike(r, p)) {
      from.push_back(leaf);
      to.push_back(parameters_[r][p]);
    } else {
      parameters_[r][p].set_data(leaf.detach().to(devices_[r], /*non_blocking=*/true, /*copy=*/true));
    }
  }
  copy_packed(from, to);
  // Last: where a copy fails, the next window copies again.
  for (const size_t p : parameters) versions[p] = parameters_[0][p]._version();
}

void ParameterRegistry::broadcast(const std::vector<size_t>& parameters,
                                  const std::vector<comm::CommunicatorPtr>& between) {
  std::vector<std::vector<at::Tensor>> alike(parameters_.size());
  std::vector<size_t> others;
  for (const size_t p : parameters) {
    bool can_broadcast = true;
    for (size_t r = 1; r < parameters_.size(); ++r) can_broadcast = can_broadcast && is_alike(r, p);
    if (!can_broadcast) others.push_back(p);
    for (size_t r = 0; can_broadcast && r < parameters_.size(); ++r) alike[r].push_back(parameters_[r][p]);
  }
  broadcast_packed(alike, between);
  for (size_t r = 1; r < parameters_.size(); ++r) {
    copy_to_replica(r, others);
    for (const size_t p : parameters) copied_versions_[r][p] = parameters_[0][p]._version();
  }
}

void ParameterRegistry::note_copied(const std::vector<int>& parameters) {
  if (!copy_check_) copy_check_.emplace();
  for (const int p : parameters) {
    const auto index = static_cast<size_t>(p);
    for (size_t r = 1; r < parameters_.size(); ++r) {
      copied_versions_[r].resize(names_.size());
      copied_versions_[r][index] = parameters_[0][index]._version();
    }
  }
}

bool ParameterRegistry::are_alike(size_t p) const {
  if (!parameters_[0][p].is_non_overlapping_and_dense()) return false;
  for (size_t r = 0; r < parameters_.size(); ++r) {
    if (!is_alike(r, p)) return false;
  }
  return true;
}

// Whether all were copied, or stored, as torch counts writes; alike and without gaps.
bool ParameterRegistry::are_copied(size_t p) const {
  if (!parameters_[0][p].is_non_overlapping_and_dense()) return false;
  for (size_t r = 1; r < parameters_.size(); ++r) {
    if (!follows(r, p)) return false;
  }
  return true;
}

bool ParameterRegistry::is_alike(size_t r, size_t p) const {
  const auto& leaf = parameters_[0][p];
  const auto& replica = parameters_[r][p];
  return replica.sizes() == leaf.sizes() && replica.strides() == leaf.strides() &&
         replica.scalar_type() == leaf.scalar_type() && replica.device() == devices_[r];
}

bool ParameterRegistry::follows(size_t r, size_t p) const {
  const auto& leaf = parameters_[0][p];
  const auto& replica = parameters_[r][p];
  if (!is_alike(r, p)) return false;
  if (share_memory(devices_[r], devices_[0])) return replica.const_data_ptr() == leaf.const_data_ptr();
  return copied_versions_[r][p] == leaf._version();
}

void ParameterRegistry::set_buffers(int module, size_t local_replica, const std::vector<at::Tensor>& buffers) {
  const size_t first = first_buffer_.at(static_cast<size_t>(module));
  const size_t count = first_buffer_.at(static_cast<size_t>(module) + 1) - first;
  if (buffers.size() != count) {
    throw InvalidArgument("module number " + std::to_string(module) + " has " + std::to_string(buffers.size()) +
                          " buffers, and had " + std::to_string(count) + " at prepare(); register them before");
  }
  for (size_t b = 0; b < count; ++b) {
    check_place("buffer", buffer_names_[first + b], buffers[b], devices_[local_replica]);
  }
  std::copy(buffers.begin(), buffers.end(), buffers_[local_replica].begin() + static_cast<ptrdiff_t>(first));
}

int ParameterRegistry::find(const at::Tensor& parameter) const noexcept {
  const auto found = index_.find(parameter.unsafeGetTensorImpl());
  return found == index_.end() ? -1 : found->second;
}

std::vector<int> ParameterRegistry::parameters_of(int module) const {
  std::vector<int> found;
  for (size_t p = 0; p < modules_.size(); ++p) {
    if (modules_[p] == module) found.push_back(static_cast<int>(p));
  }
  return found;
}

void ParameterRegistry::follow_moves(bool copies_all, const std::vector<comm::CommunicatorPtr>& between) {
  const bool are_all_read = parameters_.size() > 1;
  for (size_t p = 0; p < names_.size(); ++p) {
    const auto& leaf = parameters_[0][p];
    if (are_all_read || leaf.requires_grad()) check_place("parameter", names_[p], leaf, devices_[0]);
  }
  if (parameters_.size() < 2) return;
  const at::NoGradGuard no_grad;
  std::vector<size_t> compared;
  std::vector<std::vector<size_t>> to_copy(parameters_.size());
  for (size_t p = 0; p < names_.size(); ++p) {
    const auto& leaf = parameters_[0][p];
    const bool is_compared = copies_all && copy_check_ && are_copied(p);
    if (is_compared) compared.push_back(p);
    for (size_t r = 1; r < parameters_.size(); ++r) {
      const bool is_copy = !share_memory(devices_[r], devices_[0]);
      if (is_compared || (!(is_copy && copies_all) && follows(r, p))) continue;
      if (is_copy) {
        to_copy[r].push_back(p);
        continue;
      }
      share_with_replicas(p);
      break;
    }
    for (size_t r = 1; r < parameters_.size(); ++r) {
      if (parameters_[r][p].requires_grad() != leaf.requires_grad()) {
        parameters_[r][p].set_requires_grad(leaf.requires_grad());
      }
    }
    follow_hooks(p);
  }
  if (copy_check_) copy_check_->mend(parameters_, compared);
  if (copies_all && !between.empty()) return broadcast(to_copy[1], between);
  for (size_t r = 1; r < parameters_.size(); ++r) copy_to_replica(r, to_copy[r]);
}

// A hook on each of the others that calls replica 0's, those that are registered or removed later included. Ones that a
// replica's leaf has of its own, from the factory that built it, stand for as many of replica 0's.
void ParameterRegistry::follow_hooks(size_t p) {
  using torch::autograd::impl::get_autograd_meta;
  const auto* const meta = get_autograd_meta(parameters_[0][p]);
  if (meta == nullptr || !meta->cpp_hooks_list_) return;
  followed_hooks_.resize(names_.size());
  if (followed_hooks_[p] == meta->cpp_hooks_list_.get()) return;
  followed_hooks_[p] = meta->cpp_hooks_list_.get();
  for (size_t r = 1; r < parameters_.size(); ++r) {
    const auto& leaf = parameters_[r][p];
    if (!leaf.requires_grad()) continue;
    const auto* const own = get_autograd_meta(leaf);
    const size_t num_own = own != nullptr && own->cpp_hooks_list_ ? own->cpp_hooks_list_->size() : 0;
    leaf.register_hook([hooks = meta->cpp_hooks_list_, num_own](const at::Tensor& gradient) {
      at::TensorBase value = gradient;
      for (size_t i = num_own; i < hooks->size(); ++i) {
        if (!(*hooks)[i]) continue;  // removed
        if (auto changed = (*hooks)[i](value); changed.defined()) value = std::move(changed);
      }
      return at::Tensor(value);
    });
  }
}

void ParameterRegistry::note_agreed(size_t p) {
  if (agreed_.size() <= p) agreed_.resize(p + 1);
  const auto& leaf = parameters_[0][p];
  agreed_[p] = {leaf.const_data_ptr(), static_cast<uint32_t>(leaf._version()), agreed_[p].times + 1};
}

bool ParameterRegistry::was_written(size_t p) const noexcept {
  const auto& leaf = parameters_[0][p];
  return agreed_[p].data != leaf.const_data_ptr() || agreed_[p].version != static_cast<uint32_t>(leaf._version());
}

const EmbeddingRows* ParameterRegistry::rows_of(size_t parameter) const noexcept {
  const auto found = rows_.find(parameter);
  return found == rows_.end() ? nullptr : &found->second;
}

}  // namespace muster
