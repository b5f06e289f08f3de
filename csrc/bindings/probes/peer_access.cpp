#include "device/peer_access.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "window/copy_check.h"

namespace muster {

namespace py = pybind11;

namespace {

std::vector<c10::Device> devices_of(const std::vector<std::string>& names) { return {names.begin(), names.end()}; }

at::Tensor zeros_over_devices(const std::vector<std::pair<std::string, int64_t>>& parts,
                              const std::vector<std::string>& devices) {
  std::vector<DevicePart> on_devices;
  for (const auto& [device, bytes] : parts) on_devices.push_back({c10::Device(device), bytes});
  return zeros_over(on_devices, devices_of(devices));
}

void mend_copies(const std::vector<std::vector<at::Tensor>>& of_device) {
  std::vector<size_t> all;
  for (size_t p = 0; p < of_device.front().size(); ++p) all.push_back(p);
  CopyCheck().mend(of_device, all);
}

}  // namespace

void bind_peer_access(py::module_& parent) {
  using py::literals::operator""_a;
  py::module_ m = parent.attr("kernels");
  m.def("enable_peer_access",
        [](const std::vector<std::string>& devices) { return enable_peer_access(devices_of(devices)); });
  m.def("zeros_over", &zeros_over_devices, "parts"_a, "devices"_a, Release());
  m.def("mend_copies", &mend_copies, "of_device"_a, Release());
}

}  // namespace muster
