#include "job/devices.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <mutex>
#include <set>

#include "device/kernel_status.h"
#include "kernels/cuda/cuda_kernels.h"
#include "muster/error.h"

namespace muster {

namespace {

int num_cuda_devices() {
  if (!kernels::cuda::is_built() || !c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return 0;
  return c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount();
}

c10::Device parse_device(const std::string& name) {
  c10::Device device(c10::kCPU);
  try {
    device = c10::Device(name);
  } catch (const c10::Error&) {
    throw InvalidArgument("'" + name + "' is not a device; write \"cuda:0\", \"cpu\", \"cpu:0\", \"cpu:1\", ...");
  }
  if (device.is_cpu()) return c10::Device(c10::kCPU);
  if (!device.is_cuda()) {
    throw NotBuilt("device '" + name + "' needs a build of muster with its backend; there are the CPU and CUDA");
  }
  if (!kernels::cuda::is_built()) {
    throw NotBuilt("device '" + name +
                   "' needs a build of muster with CUDA; rebuild it with -DMUSTER_CUDA=ON, where nvcc and a CUDA build "
                   "of torch are installed, or use CPU devices");
  }
  if (device.index() < 0) device.set_index(0);
  if (device.index() >= num_cuda_devices()) {
    throw InvalidArgument("device '" + name + "' is not there: this process sees " +
                          std::to_string(num_cuda_devices()) + " CUDA device(s)");
  }
  check_code(device);
  return device;
}

}  // namespace

void check_code(c10::Device device) {
  static std::mutex mutex;
  static std::set<c10::DeviceIndex> checked;
  const std::lock_guard lock(mutex);
  if (checked.contains(device.index())) return;
  const OnDevice scope(device);
  int capability = 0;
  const auto status = kernels::cuda::check_code(capability);
  if (status.code == kernels::cuda::Status::Code::not_built) {
    throw NotBuilt("device '" + device.str() + "' has compute capability " + std::to_string(capability / 10) + "." +
                   std::to_string(capability % 10) + ", for which this build of muster has no code (" + status.problem +
                   "); rebuild it with -DCMAKE_CUDA_ARCHITECTURES=" + std::to_string(capability));
  }
  check_kernel(status, "looking for a device's code");
  checked.insert(device.index());
}

std::vector<c10::Device> parse_devices(const std::vector<std::string>& names) {
  std::vector<c10::Device> devices;
  for (const auto& name : names) devices.push_back(parse_device(name));
  if (devices.empty()) devices.emplace_back(c10::kCPU);
  for (const auto& device : devices) {
    if (device.type() == devices.front().type()) continue;
    throw InvalidArgument("one strategy's replicas are all on the CPU or all on CUDA devices; this one has " +
                          devices.front().str() + " and " + device.str());
  }
  return devices;
}

std::vector<std::string> all_cuda_devices() {
  std::vector<std::string> names;
  for (int i = 0; i < num_cuda_devices(); ++i) names.push_back("cuda:" + std::to_string(i));
  return names;
}

std::vector<std::string> device_of_worker(const Cluster& cluster) {
  return device_of_worker(cluster.local_rank, num_cuda_devices());
}

std::vector<std::string> device_of_worker(int local_rank, int num_visible) {
  if (num_visible == 0) return {};
  return {"cuda:" + std::to_string(num_visible == 1 ? 0 : local_rank)};
}

}  // namespace muster
