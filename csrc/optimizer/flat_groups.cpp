#include "optimizer/flat_groups.h"

namespace muster {

namespace {

namespace cuda = kernels::cuda;

void step(const kernels::StepArguments& arguments, const kernels::AdamGroup* groups) noexcept {
  kernels::adam_step(arguments, groups);
}
void step(const kernels::StepArguments& arguments, const kernels::SgdGroup* groups) noexcept {
  kernels::sgd_step(arguments, groups);
}
void step(const kernels::StepArguments& arguments, const kernels::AdagradGroup* groups) noexcept {
  kernels::adagrad_step(arguments, groups);
}

cuda::Status step(const cuda::StepPlan& plan, const kernels::AdamGroup* groups, cuda::Stream stream) noexcept {
  return cuda::adam_step(plan, groups, stream);
}
cuda::Status step(const cuda::StepPlan& plan, const kernels::SgdGroup* groups, cuda::Stream stream) noexcept {
  return cuda::sgd_step(plan, groups, stream);
}
cuda::Status step(const cuda::StepPlan& plan, const kernels::AdagradGroup* groups, cuda::Stream stream) noexcept {
  return cuda::adagrad_step(plan, groups, stream);
}

}  // namespace

void step_by_groups(const kernels::StepArguments& arguments, const FlatGroups& groups) noexcept {
  std::visit([&](const auto& list) { step(arguments, list.data()); }, groups);
}

void DeviceGroups::follow(const FlatGroups& groups, c10::Device device) {
  std::visit(
      [&]<class Group>(const std::vector<Group>& list) {
        using Table = DeviceTable<Group>;
        if (!std::holds_alternative<Table>(table_)) table_.emplace<Table>();
        std::get<Table>(table_).follow(list, device);
      },
      groups);
}

cuda::Status DeviceGroups::step(const cuda::StepPlan& plan, cuda::Stream stream) const {
  return std::visit([&](const auto& table) { return muster::step(plan, table.data(), stream); }, table_);
}

}  // namespace muster
