#include "gradient/layout_check.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/lines.h"
#include "muster/error.h"

namespace muster {

void check_layouts_agree(comm::Communicator& control, const FlatLayout& layout) {
  auto digest = at::zeros({1}, at::kLong);
  digest.data_ptr<int64_t>()[0] = static_cast<int64_t>(layout.digest());
  auto work = control.all_gather(digest);
  work.wait();
  const auto digests = work.outputs();
  const auto mine = digest.data_ptr<int64_t>()[0];
  const bool equal = std::all_of(digests.begin(), digests.end(),
                                 [&](const at::Tensor& d) { return d.const_data_ptr<int64_t>()[0] == mine; });
  if (equal) return;

  std::string names;
  for (const auto& parameter : layout.parameters()) names += "'" + parameter.name + "'\n";
  auto bytes = at::zeros({static_cast<int64_t>(names.size())}, at::kByte);
  std::copy(names.begin(), names.end(), bytes.data_ptr<uint8_t>());
  work = control.all_gather(bytes);
  work.wait();
  const auto texts = work.outputs();
  for (size_t r = 0; r < texts.size(); ++r) {
    const auto* first = texts[r].const_data_ptr<uint8_t>();
    const std::string theirs(first, first + texts[r].numel());
    const auto difference = first_difference(names, theirs);
    if (!difference) continue;
    throw LayoutMismatch("replica " + std::to_string(control.rank()) + " trains parameter " + difference->first +
                         " where replica " + std::to_string(r) + " trains " + difference->second +
                         "; make requires_grad and the optimizer's parameters equal on all ranks");
  }
  throw LayoutMismatch("replica " + std::to_string(control.rank()) +
                       ": shapes, dtypes or bucket_bytes of the trainable parameters differ between ranks; build the "
                       "same model with the same options everywhere");
}

void GradientOrder::learn(comm::Communicator& control, size_t num_parameters) {
  std::vector<bool> arrived(num_parameters, false);
  for (int p : arrivals_) arrived[static_cast<size_t>(p)] = true;
  for (size_t p = num_parameters; p-- > 0;) {
    if (!arrived[p]) arrivals_.push_back(static_cast<int>(p));
  }
  auto order = at::zeros({static_cast<int64_t>(num_parameters)}, at::kLong);
  std::copy(arrivals_.begin(), arrivals_.end(), order.data_ptr<int64_t>());
  control.broadcast(order, 0).wait();
  const auto* first = order.const_data_ptr<int64_t>();
  learned_.assign(first, first + order.numel());
  arrivals_.clear();
  is_learned_ = true;
}

std::vector<int> GradientOrder::take() { return std::exchange(learned_, {}); }

}  // namespace muster
