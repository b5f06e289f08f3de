#include "core/replica_context.h"

#include <ATen/RedispatchFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/_fused_dropout.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/error.h"

namespace muster {
namespace {

// Below autograd, functorch, tracing, Python's modes and subclasses, so that none of them sees the generator; above all
// backends. It is included for every call, and Python's higher-order operators pass it by, as they do no mode key's.
constexpr c10::DispatchKey kStreamKey = c10::DispatchKey::BackendSelect;
constexpr c10::DispatchKeySet kBelowStreamKey(c10::DispatchKeySet::FULL_AFTER, kStreamKey);

inline constexpr std::string_view kSlotName = "MUSTER_REPLICA";

/// A slot of ThreadLocalDebugInfo of our own: torch >= 2.12 makes slots from an address, older ones have an enum whose
/// last kind only torch's own tests use.
template <class Kind>
Kind make_slot() {
  if constexpr (std::is_enum_v<Kind>) {
    return Kind::TEST_INFO_2;
  } else {
    return Kind(&kSlotName);
  }
}

constexpr const char* kDebugName = "muster: random streams of replicas";

c10::DebugInfoKind replica_slot() { return make_slot<c10::DebugInfoKind>(); }

bool is_optional_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

void draw_from_replica(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto backend = keys.highestBackendKey();
  if (backend == c10::BackendComponent::CPUBit || backend == c10::BackendComponent::CUDABit) {
    const auto replica = current_replica();
    const auto generator = !replica                                   ? at::Generator()
                           : backend == c10::BackendComponent::CPUBit ? replica->generator
                                                                      : replica->device_generator;
    if (generator.defined()) {
      const auto& arguments = op.schema().arguments();
      const size_t first = stack->size() - arguments.size();
      for (size_t i = 0; i < arguments.size(); ++i) {
        c10::IValue& value = (*stack)[first + i];
        if (value.isNone() && is_optional_generator(arguments[i])) value = generator;
      }
    }
  }
  op.redispatchBoxed(keys & kBelowStreamKey, stack);
}

// On CUDA, native_dropout takes no generator; the operator that it is made of does.
std::tuple<at::Tensor, at::Tensor> drop_out(c10::DispatchKeySet keys, const at::Tensor& input, double p,
                                            std::optional<bool> train) {
  const auto replica = input.is_cuda() ? current_replica() : nullptr;
  if (!replica || !replica->device_generator.defined() || !train.value_or(true) || p <= 0 || p >= 1) {
    return at::redispatch::native_dropout(keys & kBelowStreamKey, input, p, train);
  }
  auto [output, mask] = at::_fused_dropout(input, 1 - p, replica->device_generator);
  return {std::move(output), mask.view(at::kBool)};
}

// Factories have a kernel for this key already; they fill their result with an operator that has none.
std::vector<c10::RegistrationHandleRAII> install_streams() {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::RegistrationHandleRAII> handles;
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(kStreamKey)) continue;
    const auto& arguments = op->schema().arguments();
    if (std::none_of(arguments.begin(), arguments.end(), is_optional_generator)) continue;
    handles.push_back(dispatcher.registerImpl(name, kStreamKey,
                                              c10::KernelFunction::makeFromBoxedFunction<&draw_from_replica>(),
                                              std::nullopt, nullptr, kDebugName));
  }
  handles.push_back(dispatcher.registerImpl(c10::OperatorName("aten::native_dropout", ""), kStreamKey,
                                            c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(drop_out)),
                                            std::nullopt, nullptr, kDebugName));
  return handles;
}

std::shared_ptr<ReplicaContext> checked(std::shared_ptr<ReplicaContext> context) {
  if (!context) throw InvalidArgument("a replica scope needs a replica's context, not a null pointer");
  return context;
}

}  // namespace

std::shared_ptr<ReplicaContext> current_replica() {
  auto* context = static_cast<ReplicaContext*>(c10::ThreadLocalDebugInfo::get(replica_slot()));
  return context == nullptr ? nullptr : context->shared_from_this();
}

ReplicaScope::ReplicaScope(std::shared_ptr<ReplicaContext> context)
    : guard_(replica_slot(), checked(std::move(context))) {
  // Never destroyed: threads may run operators while the process exits. Kept where leak checkers find it.
  [[gnu::used]] static const auto* const streams = new auto(install_streams());
}

uint64_t stream_seed(uint64_t seed, uint64_t replica, uint64_t t) noexcept {
  uint64_t hash = 0;
  for (uint64_t number : {seed, replica, t}) {
    hash = (hash ^ number) + 0x9e3779b97f4a7c15ULL;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ULL;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebULL;
    hash ^= hash >> 31;
  }
  return hash;
}

}  // namespace muster
