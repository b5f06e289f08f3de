// Streams and memory of a device, without a header of CUDA.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <vector>

struct CUstream_st;

namespace muster {

/// Whether a replica on `device` enqueues its work on a stream and does not wait for it: true for CUDA.
bool is_streamed(c10::Device device) noexcept;

/// For tests: replicas on the CPU work as if they were on a CUDA device whose kernels run at once. Set while no
/// strategy exists. With `apart` each of them has a device, and memory, of its own.
void play_streams_on_cpu(bool plays, bool apart = false) noexcept;

/// Whether replicas on these devices work in one memory.
bool share_memory(c10::Device first, c10::Device second) noexcept;
/// Whether replicas on some of these devices do.
bool share_memory(const std::vector<c10::Device>& devices) noexcept;

/// The calling thread's current stream of a CUDA device; null for the CPU.
CUstream_st* stream_handle(c10::Device device);

/// A random number generator of its own.
at::Generator new_generator(c10::Device device);

/// The calling thread's current streams by device; empty entries for the CPU.
std::vector<std::optional<c10::Stream>> current_streams(const std::vector<c10::Device>& devices);

/// While it lives, `stream` and its device are the calling thread's current ones; an empty one changes nothing.
class StreamScope {
 public:
  explicit StreamScope(const std::optional<c10::Stream>& stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  std::optional<c10::Stream> previous_;  // of the device
  c10::Device previous_device_;
};

/// While it lives, `device` is the calling thread's current one, with the stream that was current there; the CPU
/// changes nothing. Kernels launch on the current device, wherever their arguments are.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device) : scope_(current_streams({device}).front()) {}

 private:
  StreamScope scope_;
};

/// A point in a device's stream. Owned by one thread; on the CPU every point has passed.
class StreamPoint {
 public:
  /// What the calling thread's current stream of `device` holds so far.
  void record(c10::Device device);
  /// Whether the device has got there; true before the first record.
  bool has_passed() const;

 private:
  std::optional<c10::Event> event_;
};

/// A point in a device's stream, and when it was reached. Externally synchronised; on the CPU every point has passed.
class TimedPoint {
 public:
  /// What the calling thread's current stream of `device` holds so far.
  explicit TimedPoint(c10::Device device);
  bool has_passed() const { return !event_ || event_->query(); }
  /// Once both have passed, on the same device.
  double seconds_since(const TimedPoint& earlier) const;

 private:
  std::chrono::steady_clock::time_point time_;  // on the host
  std::optional<c10::Event> event_;
};

/// Makes `later` wait for what `earlier` holds so far.
void order_streams(const c10::Stream& earlier, const c10::Stream& later);
/// The same of the calling thread's current streams of two devices; nothing on the CPU.
void order_devices(c10::Device earlier, c10::Device later);

/// Host memory that copies to and from `device` need not wait for; uint8.
at::Tensor pinned_bytes(size_t bytes, c10::Device device);

}  // namespace muster
