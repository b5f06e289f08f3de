#include "optimizer/flat_groups.h"

#include "muster/error.h"

namespace muster {

namespace {

namespace cuda = kernels::cuda;

using Arguments = kernels::StepArguments;
using Copies = kernels::StepCopies;

void step(const Arguments& arguments, const kernels::AdamGroup* groups, const Copies& copies) noexcept {
  if (copies.count > 0) return kernels::adam_step_with_copies(arguments, groups, copies);
  kernels::adam_step(arguments, groups);
}
void step(const Arguments& arguments, const kernels::SgdGroup* groups, const Copies& copies) noexcept {
  if (copies.count > 0) return kernels::sgd_step_with_copies(arguments, groups, copies);
  kernels::sgd_step(arguments, groups);
}
void step(const Arguments& arguments, const kernels::AdagradGroup* groups, const Copies& copies) noexcept {
  if (copies.count > 0) return kernels::adagrad_step_with_copies(arguments, groups, copies);
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

size_t states_of(const kernels::AdamGroup& group) { return group.amsgrad ? 3 : 2; }
size_t states_of(const kernels::SgdGroup& group) { return group.momentum != 0 ? 1 : 0; }
size_t states_of(const kernels::AdagradGroup&) { return 1; }

bool moves_rows(const kernels::AdamGroup&) { return false; }
bool moves_rows(const kernels::SgdGroup& group) { return group.momentum != 0 || group.weight_decay != 0; }
bool moves_rows(const kernels::AdagradGroup& group) { return group.weight_decay != 0; }

}  // namespace

size_t count_of(const FlatGroups& groups) {
  return std::visit([](const auto& list) { return list.size(); }, groups);
}

size_t states_needed(const FlatGroups& groups, uint32_t group) {
  return std::visit([&](const auto& list) { return states_of(list[group]); }, groups);
}

bool moves_all_rows(const FlatGroups& groups, uint32_t group) {
  return std::visit([&](const auto& list) { return moves_rows(list[group]); }, groups);
}

kernels::RowwiseAdagradGroup rowwise_group_of(const FlatGroups& groups, uint32_t group) {
  const auto* const adagrad = std::get_if<std::vector<kernels::AdagradGroup>>(&groups);
  if (adagrad == nullptr || group >= adagrad->size() || (*adagrad)[group].weight_decay != 0) {
    throw InvalidArgument(
        "row_wise_adagrad needs Adagrad without weight_decay, which would move every row; use that, or leave the "
        "option out");
  }
  const auto& own = (*adagrad)[group];
  return {own.lr, own.lr_decay, own.eps, own.maximize};
}

void step_by_groups(const Arguments& arguments, const FlatGroups& groups, const Copies& copies) noexcept {
  std::visit([&](const auto& list) { step(arguments, list.data(), copies); }, groups);
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
