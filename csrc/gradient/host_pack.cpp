#include "gradient/host_pack.h"

#include <utility>

#include "core/ownership.h"
#include "device/kernel_dtype.h"
#include "kernels/kernels.h"

namespace muster {

namespace {

// The elements that `item` packs, without those of a run.
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

// The elements of a parameter that were lent go into its bucket.
void take_back(const Buckets& buckets, size_t p, BucketReduction& reduction) {
  const auto lent = reduction.take_back(p);
  if (!lent) return;
  const auto from = elements_of(lent->gradient, lent->run);
  const kernels::PackItem item{from.const_data_ptr(), kernel_dtype(from.scalar_type()),
                               elements_of(buckets.view(p), lent->run).mutable_data_ptr(),
                               static_cast<size_t>(lent->run.count)};
  kernels::pack(&item, 1, /*accumulate=*/false, lent->factor);
}

}  // namespace

void pack_on_host(const Buckets& buckets, size_t b, const Packing& packing, std::vector<GradientState>& states,
                  BucketReduction& reduction) {
  const auto& bucket = buckets[b];
  std::vector<kernels::PackItem> fresh;
  std::vector<kernels::PackItem> added;
  fresh.reserve(bucket.parameters.size());
  const auto dtype = bucket.sums.scalar_type();
  auto* const sums = static_cast<std::byte*>(bucket.sums.mutable_data_ptr());
  const bool offers = packing.may_offer && !bucket.wire.defined();
  std::vector<at::Tensor> kept;
  for (int index : bucket.parameters) {
    const auto p = static_cast<size_t>(index);
    auto& state = states[p];
    const bool adds = !packing.overwrites || state.packed;
    if (state.packed) take_back(buckets, p, reduction);
    state.packed = true;
    const auto& gradient = buckets.parameters()[p].tensor.mutable_grad();
    auto& items = adds ? added : fresh;
    // Of a slot's view no more than needed: a cache has few of the many small tensors.
    const auto& slot = buckets.slot(p);
    kernels::PackItem item{nullptr, kernel_dtype(dtype),
                           sums + static_cast<size_t>(slot.offset) * c10::elementSize(dtype),
                           static_cast<size_t>(slot.numel)};
    if (gradient.defined() && !packing.drops) {
      state.dense_used = true;
      const bool is_read = buckets.is_arranged(p, gradient);
      if (!is_read) kept.push_back(buckets.arranged(p, gradient));
      const auto& source = is_read ? gradient : kept.back();
      item.source = source.const_data_ptr();
      item.source_dtype = kernel_dtype(source.scalar_type());
      if (is_read && offers && !adds && source.scalar_type() == dtype) {
        append_without(fresh, item, reduction.offer(p, source, state.is_sole, packing.factor));
        continue;
      }
    }
    items.push_back(item);
  }
  kernels::pack(fresh.data(), fresh.size(), /*accumulate=*/false, packing.factor);
  kernels::pack(added.data(), added.size(), /*accumulate=*/true, packing.factor);
  for (int index : bucket.parameters) {
    buckets.parameters()[static_cast<size_t>(index)].tensor.mutable_grad().reset();
  }
}

}  // namespace muster
