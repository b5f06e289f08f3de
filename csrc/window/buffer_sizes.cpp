#include "window/buffer_sizes.h"

#include <string_view>

#include "core/flat_layout.h"
#include "muster/error.h"

namespace muster {

double digest_of_sizes(const std::vector<at::Tensor>& buffers) noexcept {
  constexpr int kDropped = 64 - 52;
  uint64_t hash = stable_hash("");
  for (const auto& buffer : buffers) {
    const auto sizes = buffer.sizes();
    hash = stable_hash({reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t)}, hash);
    hash = stable_hash("|", hash);
  }
  return static_cast<double>(hash >> kDropped);
}

void throw_sizes_differ(const ParameterRegistry& registry, size_t local_replica, const std::string& what) {
  std::string resized;
  for (size_t b = 0; b < registry.buffers(local_replica).size(); ++b) {
    const auto sizes = registry.buffers(local_replica)[b].sizes();
    const at::IntArrayRef prepared = registry.prepared_sizes(b);
    if (sizes == prepared) continue;
    resized += (resized.empty() ? "'" : ", '") + registry.buffer_names()[b] + "' (" + c10::str(sizes) +
               ", at prepare() " + c10::str(prepared) + ')';
  }
  if (resized.empty()) throw LayoutMismatch(what);
  throw LayoutMismatch("at a window's end replicas merge their buffers, and these have changed in size: " + resized +
                       "; give them one size on all replicas, or let what has the size of a part be a plain "
                       "attribute (" +
                       what + ')');
}

}  // namespace muster
