#include "window/memory_check.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "muster/error.h"

namespace muster {

namespace {

struct Extent {
  const std::byte* begin;
  const std::byte* end;
  const MemoryOwner* owner;
};

bool is_parameter(const Extent& extent) { return std::strcmp(extent.owner->kind, "parameter") == 0; }

std::string describe(const Extent& extent) { return std::string(extent.owner->kind) + " '" + extent.owner->name + "'"; }

[[noreturn]] void refuse(const Extent& one, const Extent& other) {
  const bool first_is_one = is_parameter(one) || !is_parameter(other);
  const auto& parameter = first_is_one ? one : other;
  throw InvalidArgument(
      describe(parameter) + " and " + describe(first_is_one ? other : one) +
      " share memory, which strategies do not keep; let both modules have the same parameter (a.weight "
      "= b.weight), or clone one of the two");
}

}  // namespace

void check_share_no_memory(const std::vector<MemoryOwner>& owners) {
  std::vector<Extent> extents;
  for (const auto& owner : owners) {
    const auto& tensor = owner.tensor;
    if (tensor.layout() != at::kStrided || tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) continue;
    const auto* const begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    if (begin == nullptr) continue;
    extents.push_back({begin, begin + tensor.nbytes(), &owner});
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return std::less<const std::byte*>()(a.begin, b.begin); });
  // By address, those that reach furthest so far: of all, and of the parameters.
  const Extent* widest = nullptr;
  const Extent* widest_parameter = nullptr;
  for (const auto& extent : extents) {
    const auto meets = [&](const Extent* earlier) {
      return earlier != nullptr && extent.begin < earlier->end &&
             !earlier->owner->tensor.is_same(extent.owner->tensor) &&
             earlier->owner->tensor.device() == extent.owner->tensor.device();
    };
    if (meets(widest_parameter)) refuse(*widest_parameter, extent);
    if (is_parameter(extent) && meets(widest)) refuse(extent, *widest);
    if (widest == nullptr || extent.end > widest->end) widest = &extent;
    if (is_parameter(extent) && (widest_parameter == nullptr || extent.end > widest_parameter->end)) {
      widest_parameter = &extent;
    }
  }
}

}  // namespace muster
