#include "gradient/device_pack.h"

#include <utility>

#include "core/plain_memory.h"
#include "device/device.h"
#include "device/kernel_dtype.h"
#include "device/kernel_status.h"

namespace muster {

DevicePack::DevicePack(const Buckets& buckets, c10::Device device)
    : buckets_(buckets), device_(device), plans_(buckets.size()) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    const auto& bucket = buckets[b];
    std::vector<kernels::cuda::PackSlot> slots;
    for (int index : bucket.parameters) {
      const auto p = static_cast<size_t>(index);
      const auto& tensor = buckets.parameters()[p].tensor;
      slots.push_back({static_cast<uint64_t>(buckets.slot(p).offset), static_cast<uint64_t>(num_reals(tensor)),
                       kernel_dtype(c10::toRealValueType(tensor.scalar_type()))});
    }
    plans_[b].slots = std::move(slots);
    plans_[b].on_device.follow(plans_[b].slots, device);
  }
}

void DevicePack::pack(size_t b, const Packing& packing, bool again, std::vector<GradientState>& states) {
  const auto& bucket = buckets_[b];
  auto& [slots, on_device] = plans_[b];
  std::vector<const void*> sources(bucket.parameters.size());
  std::vector<at::Tensor> kept;
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto p = static_cast<size_t>(bucket.parameters[i]);
    const auto& tensor = buckets_.parameters()[p].tensor;
    auto gradient = std::exchange(tensor.mutable_grad(), at::Tensor());
    states[p].packed = true;
    if (!gradient.defined() || packing.drops) continue;
    states[p].dense_used = true;
    if (!buckets_.is_arranged(p, gradient)) gradient = buckets_.arranged(p, gradient);
    sources[i] = gradient.const_data_ptr();
    slots[i].source_dtype = kernel_dtype(gradient.scalar_type());
    kept.push_back(std::move(gradient));
  }
  const bool accumulate = !packing.overwrites || again;
  const auto& packed = packing.to_wire ? bucket.wire : bucket.sums;
  on_device.follow(slots, device_);
  const kernels::cuda::PackPlan plan{on_device.items(), on_device.num_items(), on_device.chunks(),
                                     on_device.num_chunks(), kernel_dtype(packed.scalar_type())};
  const auto status = kernels::cuda::pack(plan, sources.data(), packed.mutable_data_ptr(), accumulate, 1, packing.gate,
                                          stream_handle(device_));
  check_kernel(status, "packing gradients");
}

}  // namespace muster
