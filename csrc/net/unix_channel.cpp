#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "core/wait_hook.h"
#include "muster/error.h"
#include "net/channel.h"

namespace muster::net {

namespace {

constexpr uint16_t kAttach = 0;  // the connecting end's first frame, which the channel keeps to itself
constexpr uint64_t kMaxSharedBytes = uint64_t{1} << 46;
constexpr size_t kBuffer = size_t{64} << 10;
constexpr uint64_t kStep = uint64_t{1} << 20;         // memory is taken as bytes arrive, not as a header promises
constexpr size_t kMaxPieces = 512;                    // of one system call
constexpr std::chrono::milliseconds kWriteSlice{50};  // between calls of the WaitHook
constexpr size_t kMaxDescriptors = 16;                // that one system call finds; the system closes what is beyond
// Bytes, of which the kernel takes twice. More than the usual 208 KiB spares wake-ups, and still stays in a core's
// cache from the copy in to the copy out; with 1 MB large payloads were slower.
constexpr int kSendBuffer = 400'000;

[[noreturn]] void fail(const std::string& what) {
  throw CommError(what + "; look at the log of the process at the other end of the connection");
}

[[noreturn]] void fail_with_errno(const std::string& what) { fail(what + ": " + std::strerror(errno)); }

// False at the deadline.
bool poll_for(int fd, int16_t events, Deadline deadline) {
  pollfd polled{fd, events, 0};
  return poll_until({&polled, 1}, deadline);
}

[[noreturn]] void fail_in_time(const char* what) {
  throw Timeout(std::string(what) + " within the deadline; look at the log of the other process");
}

bool is_within(uint64_t place, uint64_t bytes, uint64_t size) noexcept {
  return place <= size && bytes <= size - place;
}

class UnixChannel final : public Channel {
 public:
  UnixChannel(FileDescriptor fd, std::shared_ptr<Arena> own, bool awaits_attach)
      : fd_(std::move(fd)), own_(std::move(own)), awaits_attach_(awaits_attach), buffer_(kBuffer) {
    // The system may grant less, which works as well.
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_SNDBUF, &kSendBuffer, sizeof(kSendBuffer));
  }

  void attach(Deadline deadline) {
    FrameHeader header;
    header.type = kAttach;
    header.place = own_ ? own_->capacity() : 0;
    header.placement = Placement::in_sender;
    const auto bytes = encode(header);
    iovec data{const_cast<std::byte*>(bytes.data()), bytes.size()};
    write(&data, 1, own_ ? own_->fd() : -1, deadline);
  }

  void send(uint16_t type, std::string_view message, std::span<const Bytes> payload, Deadline deadline) override {
    const auto header = header_of(type, message, payload);
    const auto bytes = encode(header);
    std::vector<iovec> pieces{iovec_of(bytes), {const_cast<char*>(message.data()), message.size()}};
    if (header.placement == Placement::follows) {
      for (const Bytes& piece : payload) pieces.push_back(iovec_of(piece));
    }
    write(pieces.data(), pieces.size(), -1, deadline);
  }

  Bytes begin_send(uint16_t type, std::string_view message, Bytes payload,
                   std::chrono::milliseconds patience) override {
    const auto header = header_of(type, message, {&payload, 1});
    const auto bytes = encode(header);
    if (header.placement != Placement::follows) payload = {};
    std::array<iovec, 3> pieces{
        iovec_of(bytes), {const_cast<char*>(message.data()), message.size()}, iovec_of(payload)};
    iovec* left = pieces.data();
    size_t count = pieces.size();
    begin_frame();
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (!write_some(left, count, -1)) {
      if (!poll_for(fd_.get(), POLLOUT, deadline)) break;
    }
    is_in_frame_ = count > 0;
    unsent_.clear();
    for (; count > 1; ++left, --count) unsent_.append(static_cast<const char*>(left->iov_base), left->iov_len);
    return count == 0 ? Bytes() : Bytes(static_cast<const std::byte*>(left->iov_base), left->iov_len);
  }

  void end_send(Bytes rest, Deadline deadline) override {
    std::array<iovec, 2> pieces{iovec{unsent_.data(), unsent_.size()}, iovec_of(rest)};
    is_in_frame_ = false;
    write(pieces.data(), pieces.size(), -1, deadline);
    unsent_.clear();
  }

  bool receive(Frame& frame, Deadline deadline, const Placer& place) override {
    if (awaits_attach_) {
      if (!fill(FrameHeader::kBytes, deadline)) return false;
      accept_memory(take_header());
    }
    if (!fill(FrameHeader::kBytes, deadline)) return false;
    const FrameHeader header = take_header();
    if (header.type == kAttach) fail("shared memory was offered in the middle of a connection");
    frame.type = header.type;
    frame.message.clear();
    while (frame.message.size() < header.message_bytes) {
      const size_t begin = frame.message.size();
      const auto step = static_cast<size_t>(std::min(kStep, header.message_bytes - begin));
      frame.message.resize(begin + step);
      take(reinterpret_cast<std::byte*>(frame.message.data()) + begin, step, deadline);
    }
    find_payload(header, frame, deadline, place);
    return true;
  }

  bool wait_input(Deadline deadline) const override { return begin_ < end_ || wait_readable({fd_.get()}, deadline); }

  int descriptor() const noexcept override { return fd_.get(); }

  std::byte* reach(uint64_t place, uint64_t bytes) const noexcept override {
    return theirs_ && is_within(place, bytes, theirs_->size()) ? theirs_->data() + place : nullptr;
  }

  std::optional<uint64_t> place_of(const void* data, size_t bytes) const noexcept override {
    if (!own_) return std::nullopt;
    return place_in(own_->data(), own_->capacity(), data, bytes);
  }

  void close() noexcept override { ::shutdown(fd_.get(), SHUT_RDWR); }

 private:
  static std::optional<uint64_t> place_in(const std::byte* memory, size_t size, const void* data,
                                          size_t bytes) noexcept {
    const auto first = reinterpret_cast<uintptr_t>(memory);
    const auto at = reinterpret_cast<uintptr_t>(data);
    if (at < first || !is_within(at - first, bytes, size)) return std::nullopt;
    return at - first;
  }

  void place_payload(const Bytes& payload, FrameHeader& header) const {
    if (const auto own = place_of(payload.data(), payload.size())) {
      header.placement = Placement::in_sender;
      header.place = *own;
    } else if (theirs_) {
      const auto place = place_in(theirs_->data(), theirs_->size(), payload.data(), payload.size());
      if (!place) return;
      header.placement = Placement::in_reader;
      header.place = *place;
    }
  }

  FrameHeader header_of(uint16_t type, std::string_view message, std::span<const Bytes> payload) const {
    FrameHeader header;
    header.type = type;
    header.message_bytes = message.size();
    for (const Bytes& piece : payload) header.payload_bytes += piece.size();
    if (header.message_bytes > FrameHeader::kMaxMessageBytes || header.payload_bytes > FrameHeader::kMaxPayloadBytes) {
      throw InvalidArgument("a frame of " + std::to_string(message.size()) + " and " +
                            std::to_string(header.payload_bytes) + " bytes is too large; send it in pieces");
    }
    if (payload.size() == 1 && !payload[0].empty()) place_payload(payload[0], header);
    return header;
  }

  // Until all of it is sent nothing else can be.
  void begin_frame() {
    if (is_in_frame_) fail("nothing more can be sent on a connection on which a frame was cut");
    is_in_frame_ = true;
  }

  static iovec iovec_of(Bytes bytes) noexcept { return {const_cast<std::byte*>(bytes.data()), bytes.size()}; }

  void write(iovec* pieces, size_t count, int descriptor, Deadline deadline) {
    begin_frame();
    while (!write_some(pieces, count, descriptor)) {
      const auto slice = std::min(deadline, std::chrono::steady_clock::now() + kWriteSlice);
      if (!poll_for(fd_.get(), POLLOUT, slice)) {
        if (slice == deadline) fail_in_time("the other end of a connection did not read");
        WaitHook::call();
      }
      descriptor = -1;
    }
    is_in_frame_ = false;
  }

  // Sends what the socket accepts now and advances `pieces` past it; returns whether all was sent.
  bool write_some(iovec*& pieces, size_t& count, int descriptor) {
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    while (count > 0) {
      msghdr header{};
      header.msg_iov = pieces;
      header.msg_iovlen = std::min(count, kMaxPieces);
      if (descriptor >= 0) {
        header.msg_control = control.data();
        header.msg_controllen = control.size();
        cmsghdr* rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(rights), &descriptor, sizeof(int));
      }
      const ssize_t sent = ::sendmsg(fd_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) {
        if (errno == EINTR) continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) fail_with_errno("a connection ended");
        return false;
      }
      descriptor = -1;
      auto left = static_cast<size_t>(sent);
      while (count > 0 && left >= pieces->iov_len) {
        left -= pieces->iov_len;
        ++pieces;
        --count;
      }
      if (count == 0) break;
      pieces->iov_base = static_cast<std::byte*>(pieces->iov_base) + left;
      pieces->iov_len -= left;
    }
    return true;
  }

  // Until the buffer holds `bytes`; false at the end of the connection before the first of them.
  bool fill(size_t bytes, Deadline deadline) {
    while (end_ - begin_ < bytes) {
      if (begin_ > 0) {
        std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
      }
      const size_t got = read(buffer_.data() + end_, buffer_.size() - end_, deadline);
      if (got == 0) {
        if (end_ == 0) return false;
        fail("a connection ended in the middle of a frame");
      }
      end_ += got;
    }
    return true;
  }

  FrameHeader take_header() {
    const FrameHeader header = decode_header(buffer_.data() + begin_);
    begin_ += FrameHeader::kBytes;
    return header;
  }

  void take(std::byte* to, size_t bytes, Deadline deadline) {
    const size_t buffered = std::min(bytes, end_ - begin_);
    std::memcpy(to, buffer_.data() + begin_, buffered);
    begin_ += buffered;
    for (size_t have = buffered; have < bytes;) {
      const size_t got = read(to + have, bytes - have, deadline);
      if (got == 0) fail("a connection ended in the middle of a frame");
      have += got;
    }
  }

  size_t read(std::byte* to, size_t bytes, Deadline deadline) {
    for (;;) {
      iovec data{to, bytes};
      alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control;
      msghdr header{};
      header.msg_iov = &data;
      header.msg_iovlen = 1;
      header.msg_control = control.data();
      header.msg_controllen = control.size();
      const ssize_t got = ::recvmsg(fd_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
      if (got >= 0) {
        keep_descriptors(header);
        return static_cast<size_t>(got);
      }
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) fail_with_errno("a connection ended");
      if (!poll_for(fd_.get(), POLLIN, deadline)) fail_in_time("nothing came from the other end of a connection");
    }
  }

  // The peer's memory comes with the first frame, and nothing else ever does: what is not kept is closed.
  void keep_descriptors(msghdr& header) {
    size_t num_refused = 0;
    for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      const size_t bytes = c->cmsg_len - CMSG_LEN(0);
      for (size_t at = 0; at + sizeof(int) <= bytes; at += sizeof(int)) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(c) + at, sizeof(int));
        FileDescriptor descriptor(fd);
        if (awaits_attach_ && !offered_) {
          offered_ = std::move(descriptor);
        } else {
          ++num_refused;
        }
      }
    }
    if (num_refused > 0) fail("file descriptors came that nobody asked for");
    if ((header.msg_flags & MSG_CTRUNC) != 0) {
      fail("a file descriptor could not be received; this process may have too many files open (ulimit -n)");
    }
  }

  void accept_memory(const FrameHeader& header) {
    if (header.type != kAttach || header.message_bytes != 0 || header.payload_bytes != 0 ||
        header.placement != Placement::in_sender || header.place > kMaxSharedBytes ||
        (header.place > 0) != static_cast<bool>(offered_)) {
      fail("a connection began with something else than its shared memory");
    }
    if (header.place > 0) theirs_ = std::make_shared<const Mapping>(offered_.get(), static_cast<size_t>(header.place));
    offered_ = FileDescriptor();
    awaits_attach_ = false;
  }

  void find_payload(const FrameHeader& header, Frame& frame, Deadline deadline, const Placer& place) {
    const auto bytes = static_cast<size_t>(header.payload_bytes);
    frame.payload = {};
    frame.owner.reset();
    if (header.placement == Placement::follows) {
      if (bytes == 0) return;
      std::span<std::byte> to;
      if (place) to = place(frame.type, frame.message, header.payload_bytes);
      if (to.size() != bytes) {
        std::shared_ptr<std::byte[]> own(new std::byte[bytes]);
        to = {own.get(), bytes};
        frame.owner = own;
      }
      take(to.data(), bytes, deadline);
      frame.payload = to;
      return;
    }
    const std::byte* memory = nullptr;
    if (header.placement == Placement::in_sender) {
      memory = reach(header.place, bytes);
      frame.owner = theirs_;
    } else if (own_ && is_within(header.place, bytes, own_->capacity())) {
      memory = own_->data() + header.place;
      frame.owner = own_;
    }
    if (memory == nullptr) fail("a frame names memory that is not shared");
    frame.payload = {memory, bytes};
  }

  const FileDescriptor fd_;
  const std::shared_ptr<Arena> own_;
  bool awaits_attach_;
  FileDescriptor offered_;    // with the attach frame
  std::string unsent_;        // by begin_send, ahead of its payload's rest
  bool is_in_frame_ = false;  // of which not all was sent
  std::shared_ptr<const Mapping> theirs_;
  std::vector<std::byte> buffer_;
  size_t begin_ = 0;  // of what is in it
  size_t end_ = 0;
};

class UnixChannelListener final : public ChannelListener {
 public:
  explicit UnixChannelListener(const std::string& name) : fd_(listen_at(name, SOCK_STREAM)) {}

  // Others of the host may come as fast as they are sent away: the deadline holds then, too.
  std::unique_ptr<Channel> accept(Deadline deadline) override {
    do {
      FileDescriptor fd = accept_from(fd_, deadline);
      if (!fd) return nullptr;
      if (credentials_of(fd).uid == ::geteuid()) {
        return std::make_unique<UnixChannel>(std::move(fd), nullptr, /*awaits_attach=*/true);
      }
    } while (std::chrono::steady_clock::now() < deadline);
    return nullptr;
  }

 private:
  FileDescriptor fd_;
};

}  // namespace

std::unique_ptr<ChannelListener> listen_on_host(const std::string& name) {
  return std::make_unique<UnixChannelListener>(name);
}

std::unique_ptr<Channel> connect_on_host(const std::string& name, std::shared_ptr<Arena> memory, Deadline deadline) {
  FileDescriptor fd = connect_to(name, SOCK_STREAM, deadline);
  const PeerCredentials peer = credentials_of(fd);
  if (peer.uid != ::geteuid()) {
    throw AuthError("'" + name + "' is served by user " + std::to_string(peer.uid) + ", this process runs as user " +
                    std::to_string(::geteuid()) + "; run workers and servers as one user");
  }
  auto channel = std::make_unique<UnixChannel>(std::move(fd), std::move(memory), /*awaits_attach=*/false);
  channel->attach(deadline);
  return channel;
}

}  // namespace muster::net
