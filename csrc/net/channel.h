// A connection between a worker and a server: frames in order, both ways, and memory that one end may share with the
// other so that large payloads need not travel.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "net/frame.h"
#include "net/shared_segment.h"
#include "net/unix_socket.h"

namespace muster::net {

using Bytes = std::span<const std::byte>;

/// Sending and receiving are each externally synchronised; one thread may send while another receives. `close` may come
/// from any thread at any time. Every call throws CommError when the peer is gone or what it sent is no frame, and
/// Timeout at its deadline; after either, and in the middle of a frame, the channel is of no more use. A deadline that
/// has passed waits for nothing.
class Channel {
 public:
  virtual ~Channel() = default;

  /// Sends one frame, whose payload is the pieces one after the other. A single piece that lies in memory that either
  /// end shares (own_memory, reach) is sent as its place; what the sender shares must not change until the receiver,
  /// by the protocol above, is done with it. Blocks while the peer does not read, and calls the thread's WaitHook
  /// every 50 ms or so; where that throws, the frame is cut and the channel of no more use. Throws InvalidArgument
  /// above the bounds of FrameHeader, and sends nothing then.
  virtual void send(uint16_t type, std::string_view message, std::span<const Bytes> payload, Deadline deadline) = 0;

  /// As send() of one piece, but waits for no longer than `patience` for a peer that does not read; the rest of the
  /// payload, which is returned, goes with end_send(), before anything else is sent. What was sent may change at once.
  virtual Bytes begin_send(uint16_t type, std::string_view message, Bytes payload,
                           std::chrono::milliseconds patience) = 0;
  /// Sends what begin_send() left; `rest` has the bytes that it returned, perhaps elsewhere. No-op where nothing is.
  virtual void end_send(Bytes rest, Deadline deadline) = 0;

  /// Where the payload that follows a message goes: exactly `bytes` of memory, or an empty span for a buffer that the
  /// frame owns.
  using Placer = std::function<std::span<std::byte>(uint16_t type, const std::string& message, uint64_t bytes)>;

  /// Waits for one frame. Returns false when the peer closed its end between two frames. A payload that the receiver
  /// shares is where the sender wrote it; one that follows is where `place` said.
  virtual bool receive(Frame& frame, Deadline deadline, const Placer& place = {}) = 0;

  /// Waits until something has arrived, or the end; false at the deadline, which leaves the channel as it was.
  virtual bool wait_input(Deadline deadline) const = 0;

  /// Readable when something arrives, for poll(); what has arrived already wait_input() alone tells. -1 where there is
  /// none.
  virtual int descriptor() const noexcept = 0;

  /// Memory that the peer shares, as this process sees it; null where it shares none, or not that.
  virtual std::byte* reach(uint64_t place, uint64_t bytes) const noexcept = 0;

  /// The place of own shared memory, for the peer's reach; none where these bytes are not shared.
  virtual std::optional<uint64_t> place_of(const void* data, size_t bytes) const noexcept = 0;

  /// Ends both directions: calls that wait in any thread, at either end, see the end or throw CommError.
  virtual void close() noexcept = 0;
};

/// Accepts connections from processes of the same user. Owned by one thread, but for close().
class ChannelListener {
 public:
  virtual ~ChannelListener() = default;
  /// The next connection; null at the deadline. What the peer shares arrives with the first receive().
  virtual std::unique_ptr<Channel> accept(Deadline deadline) = 0;
};

/// Listens under an abstract Unix name. Throws CommError when it is taken.
std::unique_ptr<ChannelListener> listen_on_host(const std::string& name);

/// Connects to an abstract Unix name and shares `memory` (null: none), which must outlive every payload that was sent
/// from it. Throws CommError when nobody listens there, AuthError when that is another user's process.
std::unique_ptr<Channel> connect_on_host(const std::string& name, std::shared_ptr<Arena> memory, Deadline deadline);

}  // namespace muster::net
