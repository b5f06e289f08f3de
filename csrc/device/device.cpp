#include "device/device.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>

namespace muster {

namespace {

std::atomic<bool> cpu_plays_streams{false};
std::atomic<bool> cpu_replicas_are_apart{false};

c10::impl::VirtualGuardImpl guard_of(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

}  // namespace

bool is_streamed(c10::Device device) noexcept { return !device.is_cpu() || cpu_plays_streams; }

void play_streams_on_cpu(bool plays, bool apart) noexcept {
  cpu_plays_streams = plays;
  cpu_replicas_are_apart = plays && apart;
}

bool share_memory(c10::Device first, c10::Device second) noexcept {
  return first == second && !(first.is_cpu() && cpu_replicas_are_apart);
}

bool share_memory(const std::vector<c10::Device>& devices) noexcept {
  for (auto device = devices.begin(); device != devices.end(); ++device) {
    const auto is_here = [&](c10::Device other) { return share_memory(other, *device); };
    if (std::any_of(devices.begin(), device, is_here)) return true;
  }
  return false;
}

CUstream_st* stream_handle(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  return static_cast<CUstream_st*>(guard_of(device).getStream(device).native_handle());
}

at::Generator new_generator(c10::Device device) {
  return at::globalContext().getAcceleratorHooksInterface(device.type()).getNewGenerator(device.index());
}

std::vector<std::optional<c10::Stream>> current_streams(const std::vector<c10::Device>& devices) {
  std::vector<std::optional<c10::Stream>> streams(devices.size());
  for (size_t i = 0; i < devices.size(); ++i) {
    if (!devices[i].is_cpu()) streams[i] = guard_of(devices[i]).getStream(devices[i]);
  }
  return streams;
}

StreamScope::StreamScope(const std::optional<c10::Stream>& stream) : previous_device_(c10::kCPU) {
  if (!stream) return;
  const auto guard = guard_of(stream->device());
  previous_device_ = guard.exchangeDevice(stream->device());
  previous_ = guard.exchangeStream(*stream);
}

StreamScope::~StreamScope() {
  if (!previous_) return;
  const auto guard = guard_of(previous_device_);
  guard.exchangeStream(*previous_);
  guard.uncheckedSetDevice(previous_device_);
}

void StreamPoint::record(c10::Device device) {
  if (device.is_cpu()) return;
  if (!event_) event_.emplace(device.type());
  event_->record(guard_of(device).getStream(device));
}

bool StreamPoint::has_passed() const { return !event_ || event_->query(); }

TimedPoint::TimedPoint(c10::Device device) : time_(std::chrono::steady_clock::now()) {
  if (device.is_cpu()) return;
  event_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);  // which has a time
  event_->record(guard_of(device).getStream(device));
}

double TimedPoint::seconds_since(const TimedPoint& earlier) const {
  if (event_ && earlier.event_) return earlier.event_->elapsedTime(*event_) / 1000;
  return std::chrono::duration<double>(time_ - earlier.time_).count();
}

void order_streams(const c10::Stream& earlier, const c10::Stream& later) {
  if (earlier == later) return;
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

void order_devices(c10::Device earlier, c10::Device later) {
  const auto streams = current_streams({earlier, later});
  const auto& first = streams.front();
  const auto& second = streams.back();
  if (first && second) order_streams(*first, *second);
}

at::Tensor pinned_bytes(size_t bytes, c10::Device device) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).pinned_memory(!device.is_cpu()));
}

}  // namespace muster
