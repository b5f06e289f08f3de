#include "support/memory_channel.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/wait_hook.h"
#include "muster/error.h"

namespace muster::testing {

using namespace net;

namespace {

constexpr size_t kCapacity = size_t{256} << 10;
constexpr size_t kWhole = size_t{4} << 10;
constexpr std::chrono::milliseconds kSlice{50};  // between calls of the WaitHook

class WaitingOfThreads final : public Waiting {
 public:
  Deadline now() override { return std::chrono::steady_clock::now(); }
  bool wait(std::unique_lock<std::mutex>& lock, Deadline deadline, const std::function<bool()>& is_ready) override {
    return changed_.wait_until(lock, deadline, is_ready);
  }
  void notify() override { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

// One direction.
struct Pipe {
  std::string bytes;
  size_t begin = 0;      // of what was not read
  bool is_over = false;  // nobody writes any more
  bool is_deaf = false;  // nobody reads any more

  size_t unread() const { return bytes.size() - begin; }
};

struct Wire {
  std::mutex mutex;
  std::shared_ptr<Waiting> waiting;
  Pipe pipes[2];  // guarded by mutex
};

class MemoryChannel final : public Channel {
 public:
  MemoryChannel(std::shared_ptr<Wire> wire, int side)
      : wire_(std::move(wire)), waiting_(*wire_->waiting), in_(wire_->pipes[1 - side]), out_(wire_->pipes[side]) {}

  ~MemoryChannel() override {
    const std::lock_guard lock(wire_->mutex);
    out_.is_over = in_.is_deaf = true;
    waiting_.notify();
  }

  void send(uint16_t type, std::string_view message, std::span<const Bytes> payload, Deadline deadline) override {
    const auto header = header_of(type, message, payload);
    std::vector<Bytes> left{header, bytes_of(message)};
    left.insert(left.end(), payload.begin(), payload.end());
    write(left, deadline);
  }

  Bytes begin_send(uint16_t type, std::string_view message, Bytes payload,
                   std::chrono::milliseconds patience) override {
    const auto header = header_of(type, message, {&payload, 1});
    std::vector<Bytes> left{header, bytes_of(message), payload};
    const auto deadline = waiting_.now() + patience;
    std::unique_lock lock(wire_->mutex);
    while (!write_some(left) && waiting_.wait(lock, deadline, [&] { return accepts(left); })) {
    }
    unsent_.clear();
    for (const Bytes& bytes : std::span(left).first(2)) {
      unsent_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
    return left[2];
  }

  void end_send(Bytes rest, Deadline deadline) override {
    std::vector<Bytes> left{bytes_of(unsent_), rest};
    write(left, deadline);
    unsent_.clear();
  }

  bool receive(Frame& frame, Deadline deadline, const Placer& place) override {
    std::array<std::byte, FrameHeader::kBytes> bytes;
    if (!read(bytes, deadline, /*may_end=*/true)) return false;
    const FrameHeader header = decode_header(bytes.data());
    if (header.placement != Placement::follows) throw CommError("a frame names memory that is not shared");
    frame.type = header.type;
    frame.message.resize(static_cast<size_t>(header.message_bytes));
    read(std::as_writable_bytes(std::span(frame.message)), deadline, /*may_end=*/false);
    frame.payload = {};
    frame.owner.reset();
    const auto size = static_cast<size_t>(header.payload_bytes);
    if (size == 0) return true;
    std::span<std::byte> to;
    if (place) to = place(frame.type, frame.message, size);
    if (to.size() != size) {
      const std::shared_ptr<std::byte[]> own(new std::byte[size]);
      to = {own.get(), size};
      frame.owner = own;
    }
    read(to, deadline, /*may_end=*/false);
    frame.payload = to;
    return true;
  }

  bool wait_input(Deadline deadline) const override {
    std::unique_lock lock(wire_->mutex);
    return waiting_.wait(lock, deadline, [&] { return in_.unread() > 0 || in_.is_over; });
  }

  int descriptor() const noexcept override { return -1; }
  std::byte* reach(uint64_t, uint64_t) const noexcept override { return nullptr; }
  std::optional<uint64_t> place_of(const void*, size_t) const noexcept override { return std::nullopt; }

  void close() noexcept override {
    const std::lock_guard lock(wire_->mutex);
    for (Pipe& pipe : wire_->pipes) pipe.is_over = pipe.is_deaf = true;
    waiting_.notify();
  }

 private:
  static Bytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

  static std::array<std::byte, FrameHeader::kBytes> header_of(uint16_t type, std::string_view message,
                                                              std::span<const Bytes> payload) {
    FrameHeader header;
    header.type = type;
    header.message_bytes = message.size();
    for (const Bytes& piece : payload) header.payload_bytes += piece.size();
    if (header.message_bytes > FrameHeader::kMaxMessageBytes || header.payload_bytes > FrameHeader::kMaxPayloadBytes) {
      throw InvalidArgument("a frame is too large; send it in pieces");
    }
    return encode(header);
  }

  static size_t size_of(const std::vector<Bytes>& pieces) {
    size_t size = 0;
    for (const Bytes& piece : pieces) size += piece.size();
    return size;
  }

  // With the lock held, as what follows.
  bool accepts(const std::vector<Bytes>& left) const {
    return out_.is_deaf || out_.is_over || kCapacity - out_.unread() >= std::min(size_of(left), kWhole);
  }

  // Writes what has room, and takes it from `left`; returns whether that was all.
  bool write_some(std::vector<Bytes>& left) {
    if (out_.is_deaf || out_.is_over) throw CommError("a connection in memory ended");
    if (!accepts(left)) return false;
    size_t room = kCapacity - out_.unread();
    for (Bytes& piece : left) {
      const size_t size = std::min(room, piece.size());
      out_.bytes.append(reinterpret_cast<const char*>(piece.data()), size);
      piece = piece.subspan(size);
      room -= size;
    }
    waiting_.notify();
    return size_of(left) == 0;
  }

  void write(std::vector<Bytes>& left, Deadline deadline) {
    std::unique_lock lock(wire_->mutex);
    while (!write_some(left)) {
      const auto slice = std::min(deadline, waiting_.now() + kSlice);
      if (waiting_.wait(lock, slice, [&] { return accepts(left); })) continue;
      if (slice == deadline) throw Timeout("the other end of a connection in memory did not read");
      lock.unlock();
      WaitHook::call();
      lock.lock();
    }
  }

  // Fills `to`. Returns false at the end, which may only come before the first byte.
  bool read(std::span<std::byte> to, Deadline deadline, bool may_end) {
    std::unique_lock lock(wire_->mutex);
    for (size_t have = 0; have < to.size();) {
      if (!waiting_.wait(lock, deadline, [&] { return in_.unread() > 0 || in_.is_over; })) {
        throw Timeout("nothing came from the other end of a connection in memory");
      }
      if (in_.unread() == 0) {
        if (may_end && have == 0) return false;
        throw CommError("a connection in memory ended in the middle of a frame");
      }
      const size_t size = std::min(to.size() - have, in_.unread());
      std::memcpy(to.data() + have, in_.bytes.data() + in_.begin, size);
      have += size;
      in_.begin += size;
      if (in_.unread() == 0 || in_.begin >= kCapacity) {
        in_.bytes.erase(0, in_.begin);
        in_.begin = 0;
      }
      waiting_.notify();
    }
    return true;
  }

  const std::shared_ptr<Wire> wire_;
  Waiting& waiting_;
  Pipe& in_;
  Pipe& out_;
  std::string unsent_;  // by begin_send, ahead of its payload's rest
};

}  // namespace

MemoryEnds connect_in_memory(std::shared_ptr<Waiting> waiting) {
  const auto wire = std::make_shared<Wire>();
  wire->waiting = waiting ? std::move(waiting) : std::make_shared<WaitingOfThreads>();
  return {std::make_unique<MemoryChannel>(wire, 0), std::make_unique<MemoryChannel>(wire, 1)};
}

}  // namespace muster::testing
