#include "comm/hosts/tcp_group.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "comm/hosts/tcp_meeting.h"
#include "core/make_thread.h"
#include "muster/error.h"
#include "net/unforked.h"

namespace muster::comm {
namespace {

using net::FileDescriptor;

/// What comes before the bytes of a rank in an exchange, where there are any.
struct FrameHeader {
  uint64_t number = 0;  // of the exchange
  uint64_t bytes = 0;
};

/// A header and bytes, on their way through a socket in one direction.
class Way {
 public:
  Way() = default;
  Way(uint64_t number, std::byte* data, size_t bytes) : header_{number, bytes}, data_(data), bytes_(bytes) {}

  bool is_through() const noexcept { return bytes_ == 0 || done_ == sizeof(FrameHeader) + bytes_; }

  // As far as the socket takes it. Throws CommError.
  void send(int fd) {
    while (!is_through()) {
      iovec parts[kParts];
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = kParts;
      fill(parts, header_);
      if (!note(::sendmsg(fd, &message, MSG_NOSIGNAL))) return;
    }
  }

  // As far as something has come. Throws CommError.
  void receive(int fd) {
    while (!is_through()) {
      iovec parts[kParts];
      fill(parts, came_);
      const ssize_t n = ::readv(fd, parts, kParts);
      if (n == 0) throw CommError("was closed by peer");
      if (!note(n)) return;
      if (done_ >= sizeof(FrameHeader) && (came_.number != header_.number || came_.bytes != header_.bytes)) {
        throw CommError("brought " + std::to_string(came_.bytes) + " bytes of exchange " +
                        std::to_string(came_.number) + ", and " + std::to_string(header_.bytes) + " of exchange " +
                        std::to_string(header_.number) +
                        " were expected; call the same collectives, with the same sizes, on all ranks");
      }
    }
  }

 private:
  static constexpr int kParts = 2;

  // With what remains of a header and of the bytes.
  void fill(iovec (&parts)[kParts], FrameHeader& header) const {
    const size_t of_header = std::min(done_, sizeof(FrameHeader));
    const size_t of_data = done_ - of_header;
    parts[0] = {reinterpret_cast<char*>(&header) + of_header, sizeof(FrameHeader) - of_header};
    parts[1] = {data_ + of_data, bytes_ - of_data};
  }

  // Whether to go on.
  bool note(ssize_t n) {
    if (n >= 0) {
      done_ += static_cast<size_t>(n);
      return true;
    }
    if (errno == EINTR) return true;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    throw CommError(std::string("was closed by peer, or is lost (") + std::strerror(errno) + ")");
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

  void end(std::exception_ptr error) {
    output_.reset();
    input_.reset();
    finish(std::move(error));
  }

 private:
  at::Tensor output_, input_;  // until they are exchanged
};

using TcpWorkPtr = c10::intrusive_ptr<TcpWork>;

/// An exchange that waits for its turn, or is under way. By peer.
struct TcpExchange {
  TcpWorkPtr work;
  std::map<int, Way> sending;
  std::map<int, Way> receiving;
};

class TcpBackend final : public c10d::Backend {
 public:
  TcpBackend(const TcpPlace& place, std::map<int, FileDescriptor> connections)
      : Backend(place.rank, place.size),
        process_(::getpid()),
        connections_(unforked(std::move(connections))),
        wakes_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wakes_) {
      throw CommError(std::string("cannot make an eventfd: ") + std::strerror(errno) +
                      "; raise the limit of open files (ulimit -n)");
    }
    if (connections_.empty()) return;  // what comes for this rank alone needs no thread
    thread_ = make_thread("talks to other hosts", [this] { run(); });
    ::pthread_setname_np(thread_.native_handle(), "muster-hosts");
  }

  ~TcpBackend() override {
    if (::getpid() != process_) {  // a forked child has not the thread, nor perhaps the mutex
      if (thread_.joinable()) thread_.detach();
      return;
    }
    abort();
    if (thread_.joinable()) thread_.join();
  }
  TcpBackend(const TcpBackend&) = delete;
  TcpBackend& operator=(const TcpBackend&) = delete;

  const std::string getBackendName() const override { return "tcp"; }

  void abort() override {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    wake();
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& sizes_out,
                                               std::vector<int64_t>& sizes_in, const c10d::AllToAllOptions&) override {
    check(output, sizes_out);
    check(input, sizes_in);
    auto work = c10::make_intrusive<TcpWork>(output, input);
    TcpExchange exchange{work, {}, {}};
    const auto into = pieces(output, sizes_out);
    const auto from = pieces(input, sizes_in);
    for (int rank = 0; rank < getSize(); ++rank) {
      const auto& [to, received] = into[static_cast<size_t>(rank)];
      const auto& [of, sent] = from[static_cast<size_t>(rank)];
      if (rank == getRank()) {
        if (received != sent) throw InvalidArgument("what a rank sends to itself in an exchange has two sizes");
        if (sent > 0) std::memcpy(to, of, sent);
      } else if (connections_.contains(rank)) {
        exchange.sending.emplace(rank, Way(exchanges_, of, sent));
        exchange.receiving.emplace(rank, Way(exchanges_, to, received));
      } else if (received > 0 || sent > 0) {
        throw InvalidArgument(tcp_peer_name(rank) + " is no peer of " + tcp_peer_name(getRank()));
      }
    }
    ++exchanges_;
    if (connections_.empty()) {
      work->end(nullptr);
    } else {
      add(std::move(exchange));
    }
    return work;
  }

 private:
  using Piece = std::pair<std::byte*, size_t>;
  using Connections = std::map<int, net::UnforkedDescriptor>;  // by peer

  static Connections unforked(std::map<int, FileDescriptor> connections) {
    Connections kept;
    for (auto& [peer, fd] : connections) {
      kept.emplace(peer, net::UnforkedDescriptor([&fd = fd] { return std::move(fd); }));
    }
    return kept;
  }

  void check(const at::Tensor& tensor, const std::vector<int64_t>& sizes) const {
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    const bool are_sizes = static_cast<int>(sizes.size()) == getSize() &&
                           std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 0; }) &&
                           std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == rows;
    if (!tensor.is_cpu() || !tensor.is_contiguous() || !are_sizes) {
      throw InvalidArgument(
          "an exchange between hosts takes contiguous CPU tensors, and for each rank a size, which add up to theirs");
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

  void add(TcpExchange exchange) {
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

  // Until a socket of `polled` is ready, or something was put into waiting_. False once the group is to end.
  bool await_event(std::vector<pollfd>& polled) {
    polled.push_back({wakes_.get(), POLLIN, 0});
    net::poll_until(polled, net::Deadline::max());
    uint64_t count = 0;
    if (polled.back().revents != 0) (void)!::read(wakes_.get(), &count, sizeof(count));
    const std::lock_guard lock(mutex_);
    return !stops_;
  }

  // The next one that waits for its turn.
  std::optional<TcpExchange> next() {
    const std::lock_guard lock(mutex_);
    if (waiting_.empty()) return std::nullopt;
    auto exchange = std::move(waiting_.front());
    waiting_.pop_front();
    return exchange;
  }

  void run() noexcept {
    std::optional<TcpExchange> current;
    std::exception_ptr error;
    try {
      for (std::vector<pollfd> polled; await_event(polled); polled.clear()) {
        for (current = next(); current; current = next()) {
          if (!carry_out(*current)) throw_ended();
          current->work->end(nullptr);
        }
      }
      throw_ended();
    } catch (...) {
      error = std::current_exception();
    }
    fail(current ? current->work : TcpWorkPtr(), error);
  }

  [[noreturn]] static void throw_ended() {
    throw CommError("the connections between hosts were ended here: the strategy was closed, or failed");
  }

  // False where the group is to end before it is done. Throws CommError.
  bool carry_out(TcpExchange& exchange) {
    while (move(exchange)) {
      std::vector<pollfd> polled;
      for (const auto& [peer, fd] : connections_) {
        const bool sends = !exchange.sending[peer].is_through();
        const bool receives = !exchange.receiving[peer].is_through();
        const int events = (sends ? POLLOUT : 0) | (receives ? POLLIN : 0);
        if (events != 0) polled.push_back({fd.get(), static_cast<short>(events), 0});
      }
      if (!await_event(polled)) return false;
    }
    return true;
  }

  // Sends and receives what the sockets take and have now. Returns whether something remains. Throws CommError.
  bool move(TcpExchange& exchange) {
    bool remains = false;
    for (const auto& [peer, fd] : connections_) {
      auto& sending = exchange.sending[peer];
      auto& receiving = exchange.receiving[peer];
      try {
        sending.send(fd.get());
        receiving.receive(fd.get());
      } catch (const CommError& error) {
        throw CommError("the connection to " + tcp_peer_name(peer) + " " + error.what());
      }
      remains = remains || !sending.is_through() || !receiving.is_through();
    }
    return remains;
  }

  // Peers that wait for this rank learn of it by the ends of their connections.
  void fail(const TcpWorkPtr& current, const std::exception_ptr& error) noexcept {
    std::deque<TcpExchange> failed;
    {
      const std::lock_guard lock(mutex_);
      failure_ = error;
      failed.swap(waiting_);
    }
    for (const auto& [peer, fd] : connections_) ::shutdown(fd.get(), SHUT_RDWR);
    if (current) current->end(error);
    for (const auto& exchange : failed) exchange.work->end(error);
  }

  const pid_t process_;
  const Connections connections_;
  const FileDescriptor wakes_;  // readable: look at what is guarded by mutex_
  uint64_t exchanges_ = 0;      // of the threads that issue, one at a time
  std::mutex mutex_;
  std::deque<TcpExchange> waiting_;  // guarded by mutex_
  std::exception_ptr failure_;       // guarded by mutex_; set once
  bool stops_ = false;               // guarded by mutex_
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
