#include "optimizer/parameter_home.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

#include "comm/peer_memory.h"
#include "core/flat_layout.h"
#include "optimizer/own_memory.h"

namespace muster {

ParameterHome::ParameterHome(const std::vector<std::vector<at::Tensor>>& parameters,
                             const std::vector<comm::CommunicatorPtr>& replicas) {
  constexpr auto kAlignment = static_cast<size_t>(FlatLayout::kSlotAlignment);
  size_t bytes = 0;
  for (size_t p = 0; p < parameters.front().size(); ++p) {
    const auto& parameter = parameters.front()[p];
    std::vector<at::Tensor> others;
    for (size_t r = 1; r < parameters.size(); ++r) others.push_back(parameters[r][p]);
    places_.push_back({parameter, std::move(others), parameter.scalar_type(), parameter.sizes().vec(), bytes});
    bytes += (parameter.nbytes() + kAlignment - 1) / kAlignment * kAlignment;
  }
  memory_ = replicas.front()->allocate(static_cast<int64_t>(std::max(bytes, kAlignment)), at::kByte);
  bring_back();

  // All replicas of a process show the same memory.
  std::vector<void*> homes;
  std::vector<comm::Work> works;
  try {
    for (const auto& replica : replicas) {
      const auto size = static_cast<size_t>(replica->size());
      works.push_back(replica->peer_memory()->visit(
          memory_, bytes, [&homes, size](void* const* data) { homes.assign(data, data + size); }));
    }
    for (auto& work : works) work.wait();
  } catch (...) {
    leave();
    throw;
  }
  homes.erase(std::unique(homes.begin(), homes.end()), homes.end());
  auto* const own = static_cast<std::byte*>(memory_.mutable_data_ptr());
  for (void* home : homes) {
    if (home != own) displacements_.push_back(static_cast<std::byte*>(home) - own);
  }
}

bool ParameterHome::fits(const std::vector<at::Tensor>& parameters) const {
  return std::equal(places_.begin(), places_.end(), parameters.begin(), parameters.end(),
                    [](const Place& place, const at::Tensor& parameter) {
                      return place.parameter.is_same(parameter) && place.has_room();
                    });
}

bool ParameterHome::Place::has_room() const {
  return dtype == parameter.scalar_type() && parameter.sizes() == sizes && parameter.device().is_cpu();
}

// Of the parameter's storage: it, and other replicas'.
size_t ParameterHome::Place::num_sharing() const {
  const auto shares = [&](const at::Tensor& other) { return other.is_alias_of(parameter); };
  return 1 + static_cast<size_t>(std::count_if(others.begin(), others.end(), shares));
}

void ParameterHome::bring_back() {
  bring_back([this](size_t i) { return std::vector<Run>{{0, places_[i].parameter.numel()}}; });
}

void ParameterHome::bring_back(const std::function<std::vector<Run>(size_t parameter)>& runs) {
  const at::NoGradGuard no_grad;
  auto* const first = static_cast<std::byte*>(memory_.mutable_data_ptr());
  for (size_t i = 0; i < places_.size(); ++i) {
    const auto& place = places_[i];
    auto* const home = first + place.offset;
    const auto& parameter = place.parameter;
    if (parameter.const_data_ptr() == home || parameter.numel() == 0 || !place.has_room()) continue;
    const auto values = [&] {
      const auto dense =
          is_dense(place.sizes, parameter.strides().vec()) ? parameter.detach() : parameter.contiguous().detach();
      // A storage of its own, so that whoever saves or copies one does not take all.
      auto at_home = at::from_blob(
          home, place.sizes, dense.strides(), [memory = memory_](void*) {}, dense.options().requires_grad(false));
      for (const auto& run : runs(i)) elements_of(at_home, run).copy_(elements_of(dense, run));
      return at_home;
    }();
    move_to(values, parameter, place.num_sharing());
  }
}

void ParameterHome::leave() {
  const at::NoGradGuard no_grad;
  const auto* const first = static_cast<const std::byte*>(memory_.const_data_ptr());
  for (const auto& place : places_) {
    if (place.parameter.const_data_ptr() == first + place.offset) give_own_memory(place.parameter, place.num_sharing());
  }
}

}  // namespace muster
