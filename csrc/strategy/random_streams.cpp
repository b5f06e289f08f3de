#include "strategy/random_streams.h"

#include <ATen/CPUGeneratorImpl.h>

#include "device/device.h"
#include "device/kernel_status.h"

namespace muster {

RandomStreams::RandomStreams(const std::vector<c10::Device>& devices, uint64_t seed) : seed_(seed) {
  for (const auto& device : devices) {
    on_host_.push_back(at::detail::createCPUGenerator(0));
    on_device_.push_back(device.is_cpu() ? at::Generator() : new_generator(device));
  }
}

void RandomStreams::give(ReplicaContext& context, uint64_t call) {
  auto& generator = on_host_[static_cast<size_t>(context.local_replica)];
  generator.set_current_seed(stream_seed(seed_, static_cast<uint64_t>(context.replica), call));
  context.generator = generator;
  auto& on_device = on_device_[static_cast<size_t>(context.local_replica)];
  // A graph replays its own draws: torch.cuda.graph knows the ambient generator.
  if (on_device.defined() && !is_capturing(on_device.device())) {
    on_device.set_current_seed(generator.current_seed());
    context.device_generator = on_device;
  }
}

}  // namespace muster
