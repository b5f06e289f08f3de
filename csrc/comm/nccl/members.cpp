#include "comm/nccl/members.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>

#include "muster/error.h"

namespace muster::comm::nccl {

namespace {

constexpr int64_t kIdentityBytes = 256;

}  // namespace

void check_arguments(int first_rank, int size, const std::vector<c10::Device>& devices,
                     const std::vector<NcclOptions>& options) {
  const int ranks = static_cast<int>(devices.size());
  if (ranks < 1 || first_rank < 0 || first_rank + ranks > size || options.size() != devices.size()) {
    throw InvalidArgument("an NCCL group of " + std::to_string(size) + " ranks has no ranks " +
                          std::to_string(first_rank) + " to " + std::to_string(first_rank + ranks - 1) +
                          " with as many options (" + std::to_string(options.size()) +
                          "); give each rank of the process a device and options");
  }
  for (int i = 0; i < ranks; ++i) {
    const CommunicatorPtr& control = options[static_cast<size_t>(i)].control;
    if (!control && options[0].check) {
      throw InvalidArgument("NcclOptions::check compares requests over NcclOptions::control; give a control group");
    }
    if (control) check_control(*control, first_rank + i, size);
  }
}

void check_control(const Communicator& control, int rank, int size) {
  if (control.rank() == rank && control.size() == size && control.device().is_cpu()) return;
  throw InvalidArgument("the control group of rank " + std::to_string(rank) + " of " + std::to_string(size) +
                        " is a group on " + control.device().str() + ", seen from rank " +
                        std::to_string(control.rank()) + " of " + std::to_string(control.size()) +
                        "; give that rank's handle of a group on the host over the same ranks");
}

void check_devices_differ(const DeviceApi& device, int first_rank, const std::vector<int>& devices,
                          const std::vector<NcclOptions>& options) {
  if (!device.identity) return;
  std::vector<std::string> identities;
  for (const int index : devices) identities.push_back(device.identity(index).substr(0, kIdentityBytes));
  if (options[0].control) {
    std::vector<Work> works;  // all of them first: each awaits the others
    for (size_t i = 0; i < identities.size(); ++i) {
      const at::Tensor card = at::zeros({kIdentityBytes}, at::kByte);
      std::copy(identities[i].begin(), identities[i].end(), card.data_ptr<uint8_t>());
      works.push_back(options[i].control->all_gather(card));
    }
    for (Work& work : works) work.wait(options[0].timeout);
    identities.clear();
    for (const at::Tensor& card : works[0].outputs()) {
      const auto* const bytes = card.const_data_ptr<uint8_t>();
      identities.emplace_back(bytes, std::find(bytes, bytes + card.numel(), uint8_t{0}));
    }
    first_rank = 0;
  }
  for (auto second = identities.begin(); second != identities.end(); ++second) {
    const auto first = std::find(identities.begin(), second, *second);
    if (first == second || second->empty()) continue;
    const auto name = [&](auto rank) { return std::to_string(first_rank + (rank - identities.begin())); };
    throw InvalidArgument("ranks " + name(first) + " and " + name(second) + " are on the same GPU (" + *second +
                          "), which NCCL refuses; give each worker a GPU of its own (its device, or "
                          "CUDA_VISIBLE_DEVICES), start fewer workers, or put several replicas of a GPU into one "
                          "process with MirroredStrategy");
  }
}

}  // namespace muster::comm::nccl
