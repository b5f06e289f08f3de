#include "comm/hosts/tcp_group.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "comm/hosts/tcp_meeting.h"
#include "muster/error.h"

namespace muster::comm {
namespace {

using net::FileDescriptor;

/// What comes before the bytes of a rank in an exchange, where there are any.
struct FrameHeader {
  uint64_t number = 0;  // of the exchange
  uint64_t bytes = 0;
};

/// A header and bytes, on their way through a socket in one direction.
class Half {
 public:
  Half() = default;
  Half(uint64_t number, std::byte* data, size_t bytes) : header_{number, bytes}, data_(data), bytes_(bytes) {}

  bool is_through() const noexcept { return bytes_ == 0 || done_ == sizeof(FrameHeader) + bytes_; }

  // As far as the socket takes it. Throws CommError.
  void send(int fd) {
    while (!is_through()) {
      iovec parts[2];
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = rest(header_, parts);
      if (!note(::sendmsg(fd, &message, MSG_NOSIGNAL))) return;
    }
  }

  // As far as something has come. Throws CommError.
  void receive(int fd) {
    while (!is_through()) {
      iovec parts[2];
      const int count = static_cast<int>(rest(came_, parts));
      const ssize_t n = ::readv(fd, parts, count);
      if (n == 0) throw CommError("it was closed by peer");
      if (!note(n)) return;
      if (done_ >= sizeof(FrameHeader) && (came_.number != header_.number || came_.bytes != header_.bytes)) {
        throw CommError("the other end sends " + std::to_string(came_.bytes) + " bytes in its exchange " +
                        std::to_string(came_.number) + ", and " + std::to_string(header_.bytes) +
                        " were expected in exchange " + std::to_string(header_.number));
      }
    }
  }

 private:
  size_t rest(FrameHeader& header, iovec* parts) const {
    const size_t of_header = std::min(done_, sizeof(FrameHeader));
    const size_t of_data = done_ - of_header;
    parts[0] = {reinterpret_cast<char*>(&header) + of_header, sizeof(FrameHeader) - of_header};
    parts[1] = {data_ + of_data, bytes_ - of_data};
    return 2;
  }

  // Whether to go on.
  bool note(ssize_t n) {
    if (n >= 0) {
      done_ += static_cast<size_t>(n);
      return true;
    }
    if (errno == EINTR) return true;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    throw CommError(std::strerror(errno));
  }

  FrameHeader header_;
  FrameHeader came_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  size_t done_ = 0;  // of header and bytes
};

class TcpWork final : public c10d::Work {
 public:
  TcpWork(at::Tensor output, at::Tensor input) : output_(std::move(output)), input_(std::move(input)) {}

  bool isCompleted() override {
    const std::lock_guard lock(mutex_);
    return is_done_;
  }
  bool isSuccess() const override {
    const std::lock_guard lock(mutex_);
    return is_done_ && !error_;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    if (timeout.count() <= 0) {  // c10d's kNoTimeout
      done_.wait(lock, [&] { return is_done_; });
    } else if (!done_.wait_for(lock, timeout, [&] { return is_done_; })) {
      throw Timeout("an exchange between hosts is still under way after " + std::to_string(timeout.count()) + " ms");
    }
    if (error_) std::rethrow_exception(error_);
    return true;
  }

  void end(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    is_done_ = true;
    done_.notify_all();
  }

 private:
  const at::Tensor output_, input_;  // kept until they are exchanged
  mutable std::mutex mutex_;
  std::condition_variable done_;
  bool is_done_ = false;      // guarded by mutex_
  std::exception_ptr error_;  // guarded by mutex_
};

using TcpWorkPtr = c10::intrusive_ptr<TcpWork>;

/// An exchange that waits for its turn, or is under way. By peer.
struct Exchange {
  TcpWorkPtr work;
  std::map<int, Half> sending;
  std::map<int, Half> receiving;
};

class TcpBackend final : public c10d::Backend {
 public:
  TcpBackend(const TcpPlace& place, std::map<int, FileDescriptor> connections)
      : Backend(place.rank, place.size),
        connections_(std::move(connections)),
        wakes_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wakes_) throw CommError(std::string("cannot make an eventfd: ") + std::strerror(errno));
    thread_ = std::thread([this] { run(); });
    ::pthread_setname_np(thread_.native_handle(), "muster-hosts");
  }

  ~TcpBackend() override {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    wake();
    thread_.join();
  }
  TcpBackend(const TcpBackend&) = delete;
  TcpBackend& operator=(const TcpBackend&) = delete;

  const std::string getBackendName() const override { return "tcp"; }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& sizes_out,
                                               std::vector<int64_t>& sizes_in, const c10d::AllToAllOptions&) override {
    check(output, sizes_out);
    check(input, sizes_in);
    auto work = c10::make_intrusive<TcpWork>(output, input);
    Exchange exchange{work, {}, {}};
    const auto into = pieces(output, sizes_out);
    const auto from = pieces(input, sizes_in);
    for (int rank = 0; rank < getSize(); ++rank) {
      const auto& [to, size] = into[static_cast<size_t>(rank)];
      const auto& [of, given] = from[static_cast<size_t>(rank)];
      if (rank == getRank()) {
        if (size != given) throw InvalidArgument("an exchange has another size for its own rank on both sides");
        if (size > 0) std::memcpy(to, of, size);
      } else if (connections_.contains(rank)) {
        exchange.sending.emplace(rank, Half(exchanges_, of, given));
        exchange.receiving.emplace(rank, Half(exchanges_, to, size));
      } else if (size > 0 || given > 0) {
        throw InvalidArgument(tcp_peer_name(rank) + " is no peer of " + tcp_peer_name(getRank()));
      }
    }
    ++exchanges_;
    add(std::move(exchange));
    return work;
  }

 private:
  using Piece = std::pair<std::byte*, size_t>;

  void check(const at::Tensor& tensor, const std::vector<int64_t>& sizes) const {
    if (!tensor.is_cpu() || !tensor.is_contiguous() || static_cast<int>(sizes.size()) != getSize()) {
      throw InvalidArgument("an exchange between hosts takes contiguous CPU tensors, and a size for each rank");
    }
  }

  // By rank. Sizes count along the first dimension.
  static std::vector<Piece> pieces(const at::Tensor& tensor, const std::vector<int64_t>& sizes) {
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    const size_t row = rows == 0 ? 0 : tensor.nbytes() / static_cast<size_t>(rows);
    auto* next = static_cast<std::byte*>(tensor.mutable_data_ptr());
    std::vector<Piece> found;
    for (const int64_t size : sizes) {
      found.emplace_back(next, static_cast<size_t>(size) * row);
      next += found.back().second;
    }
    return found;
  }

  void add(Exchange exchange) {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_) {
        waiting_.push_back(std::move(exchange));
        wake();
        return;
      }
    }
    exchange.work->end(failure_);
  }

  void wake() const {
    const uint64_t one = 1;
    (void)!::write(wakes_.get(), &one, sizeof(one));
  }

  // False once there is an end.
  bool await_word(std::vector<pollfd>& polled) {
    polled.push_back({wakes_.get(), POLLIN, 0});
    net::poll_until(polled, net::Deadline::max());
    uint64_t count = 0;
    if (polled.back().revents != 0) (void)!::read(wakes_.get(), &count, sizeof(count));
    const std::lock_guard lock(mutex_);
    return !stops_;
  }

  // Null where none waits.
  std::optional<Exchange> next() {
    const std::lock_guard lock(mutex_);
    if (waiting_.empty()) return std::nullopt;
    auto exchange = std::move(waiting_.front());
    waiting_.pop_front();
    return exchange;
  }

  void run() noexcept {
    std::exception_ptr end = std::make_exception_ptr(CommError("the process group has ended"));
    for (std::vector<pollfd> polled; await_word(polled); polled.clear()) {
      while (auto exchange = next()) {
        if (!carry_out(*exchange, end)) return fail(*exchange, end);
      }
    }
    fail({}, end);
  }

  // False where the group has ended, with the error.
  bool carry_out(Exchange& exchange, std::exception_ptr& end) noexcept {
    try {
      while (move(exchange)) {
        std::vector<pollfd> polled;
        for (const auto& [peer, fd] : connections_) {
          const bool sends = !exchange.sending[peer].is_through();
          const bool receives = !exchange.receiving[peer].is_through();
          const int events = (sends ? POLLOUT : 0) | (receives ? POLLIN : 0);
          if (events != 0) polled.push_back({fd.get(), static_cast<short>(events), 0});
        }
        if (!await_word(polled)) return false;
      }
    } catch (...) {
      end = std::current_exception();
      return false;
    }
    exchange.work->end(nullptr);
    return true;
  }

  // As far as it goes now. Whether something remains. Throws CommError.
  bool move(Exchange& exchange) {
    bool remains = false;
    for (const auto& [peer, fd] : connections_) {
      auto& sending = exchange.sending[peer];
      auto& receiving = exchange.receiving[peer];
      try {
        sending.send(fd.get());
        receiving.receive(fd.get());
      } catch (const CommError& error) {
        throw CommError("the connection to " + tcp_peer_name(peer) + ": " + error.what());
      }
      remains = remains || !sending.is_through() || !receiving.is_through();
    }
    return remains;
  }

  // Peers that wait for this rank learn of it by the ends of their connections.
  void fail(const Exchange& current, const std::exception_ptr& error) noexcept {
    std::deque<Exchange> failed;
    {
      const std::lock_guard lock(mutex_);
      failure_ = error;
      failed.swap(waiting_);
    }
    for (const auto& [peer, fd] : connections_) ::shutdown(fd.get(), SHUT_RDWR);
    if (current.work) current.work->end(error);
    for (const auto& exchange : failed) exchange.work->end(error);
  }

  const std::map<int, FileDescriptor> connections_;  // by peer
  const FileDescriptor wakes_;                       // readable: look at what is guarded by mutex_
  uint64_t exchanges_ = 0;                           // of the threads that issue, one at a time
  std::mutex mutex_;
  std::deque<Exchange> waiting_;  // guarded by mutex_
  std::exception_ptr failure_;    // guarded by mutex_; set once
  bool stops_ = false;            // guarded by mutex_
  std::thread thread_;
};

}  // namespace

ProcessGroupPtr make_tcp_group(c10d::Store& store, const TcpPlace& place, Milliseconds timeout) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(place.rank, place.size);
  c10::intrusive_ptr<c10d::Backend> backend =
      c10::make_intrusive<TcpBackend>(place, meet_over_tcp(store, place, timeout));
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

}  // namespace muster::comm
