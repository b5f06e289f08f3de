#include <algorithm>
#include <array>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "comm/c10d/transport.h"
#include "comm/hosts/communicator.h"
#include "comm/hosts/job.h"
#include "comm/peer_memory.h"
#include "core/wait_hook.h"
#include "muster/error.h"

namespace muster::comm {
namespace {

using Clock = std::chrono::steady_clock;
using hosts::Job;

constexpr int64_t kScratchBytes = int64_t{4} << 20;  // of a piece
constexpr size_t kScratches = 4;                     // pieces under way at once
constexpr int64_t kRowAlignment = 64;
constexpr std::chrono::microseconds kPause{20};  // between looks at what comes from other hosts
constexpr Milliseconds kHookInterval{50};
constexpr Milliseconds kBetweenQuestions{2000};  // for lost workers, of whoever waits for other hosts
constexpr Milliseconds kPatienceForWord{1000};   // of a worker that is lost

/// What the replicas of one worker share.
struct Crossing {
  HostsLayout layout;
  int worker = 0;
  std::shared_ptr<C10dTransport> exchange;  // used by the worker's first replica alone, as the next one
  std::shared_ptr<C10dTransport> results;
  std::shared_ptr<LostWorkers> lost;
};

/// A wait for other workers, while it lives.
class LastingWait {
 public:
  explicit LastingWait(LostWorkers* lost) : lost_(lost) {
    if (lost_ != nullptr) lost_->begin_wait();
  }
  ~LastingWait() {
    if (lost_ != nullptr) lost_->end_wait();
  }
  LastingWait(const LastingWait&) = delete;
  LastingWait& operator=(const LastingWait&) = delete;

 private:
  LostWorkers* const lost_;
};

// Words of process groups, Gloo and ours, for a peer whose connection ended.
bool is_of_connection(std::string_view text) {
  for (const auto* const words :
       {"closed by peer", "reset by peer", "Broken pipe", "No route to host", "unreachable"}) {
    if (text.find(words) != std::string_view::npos) return true;
  }
  return false;
}

class OverHosts;

/// A job under way. Each stage is begun once what the one before had begun is done.
struct Stages final : Work::Impl {
  enum Stage { reading, exchanging, returning, writing, taking, num_stages };

  bool advance() override;
  void wait(Milliseconds timeout) override;

  std::shared_ptr<OverHosts> owner;
  std::unique_ptr<Job> job;
  uint64_t number = 0;
  std::optional<uint64_t> before;  // the number of the job that has had its scratch memory
  int begun = 0;                   // stages
  Work current;
  std::vector<void*> memory;  // of this host's ranks
};

/// One replica's transport. Jobs are read, exchanged, returned, written and taken in the order in which they were
/// given, each of these by itself: while one waits for its results the next is exchanged. So all ranks issue alike in
/// each group, whatever they waited for.
class OverHosts final : public Transport, public std::enable_shared_from_this<OverHosts> {
 public:
  OverHosts(std::shared_ptr<const Crossing> crossing, int rank, CommunicatorPtr up, CommunicatorPtr down)
      : crossing_(std::move(crossing)), rank_(rank), up_(std::move(up)), down_(std::move(down)) {
    if (up_->peer_memory() == nullptr) throw InvalidArgument("the ranks of a host need memory that they share");
    for (auto& scratch : scratches_) scratch.memory = up_->allocate(kScratchBytes, at::kByte);
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return layout().num_ranks(); }
  c10::Device device() const noexcept override { return c10::Device(c10::kCPU); }
  int worker_of(int rank) const noexcept override { return layout().worker_of(rank); }

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override { return up_->allocate(numel, dtype); }

  Work all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    const auto reduction = op == ReduceOp::min   ? kernels::Reduction::min
                           : op == ReduceOp::max ? kernels::Reduction::max
                                                 : kernels::Reduction::sum;
    // Pieces are alike on all ranks, wherever each has its tensor.
    const bool is_seen =
        is_alone() || up_->peer_memory()->address_of(tensor.const_data_ptr(), tensor.nbytes()).has_value();
    const int64_t most = kScratchBytes / static_cast<int64_t>(tensor.element_size());
    return in_pieces(tensor, most, !is_seen, [&](const at::Tensor& piece) {
      if (is_seen) return hosts::reduce(carrying(), piece, reduction);
      const auto bytes = scratch(static_cast<int64_t>(piece.nbytes()));
      return hosts::reduce(carrying(), piece, reduction, bytes.view(piece.scalar_type()));
    });
  }

  Work broadcast(const at::Tensor& tensor, int source) override {
    return in_pieces(tensor.view(at::kByte), kScratchBytes, true, [&](const at::Tensor& piece) {
      return hosts::broadcast(carrying(), scratch(piece.numel()), piece, source);
    });
  }

  Work gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input) override {
    const int64_t most = kScratchBytes / size() / kRowAlignment * kRowAlignment;
    int64_t begin = 0;
    return in_pieces(input.view(at::kByte), most, true, [&](const at::Tensor& piece) {
      std::vector<at::Tensor> parts;
      for (const auto& output : outputs) parts.push_back(output.view(at::kByte).narrow(0, begin, piece.numel()));
      begin += piece.numel();
      return hosts::gather(carrying(), scratch(size() * piece.numel()), piece, std::move(parts));
    });
  }

  void abort(const std::string& reason) noexcept override {
    up_->abort(reason);
    down_->abort(reason);
    crossing_->exchange->abort(reason);
    crossing_->results->abort(reason);
  }

  bool advance(const Stages& stages) {
    return is_done(stages) || guarded([&] {
             check_hosts_groups();
             run();
             return is_done(stages);
           });
  }

  void wait(const Stages& stages, Milliseconds timeout) {
    const auto deadline = Clock::now() + timeout;
    auto last_hook = Clock::now();
    auto last_asked = last_hook;
    if (is_done(stages)) return;
    const LastingWait lasting(crossing_->lost.get());
    guarded([&] {
      for (run(); !is_done(stages); run()) {
        Stages& front = *under_way_.front();
        const auto left = std::max(Milliseconds(0), std::chrono::ceil<Milliseconds>(deadline - Clock::now()));
        const bool is_across = front.begun == Stages::exchanging + 1 || front.begun == Stages::returning + 1;
        if (!is_across) {
          front.current.wait(left);
          continue;
        }
        check_hosts_groups();
        if (left.count() == 0) {
          throw Timeout("nothing came from another host within " + std::to_string(timeout.count()) +
                        " ms. Look at the network between the hosts and at what the workers there are doing; if they "
                        "are only slow, raise `timeout`");
        }
        std::this_thread::sleep_for(kPause);
        if (Clock::now() - last_hook < kHookInterval) continue;
        WaitHook::call();
        last_hook = Clock::now();
        // A wait of another group of this worker may have heard of it.
        const bool knows = crossing_->lost && crossing_->lost->knows();
        if (!knows && last_hook - last_asked < kBetweenQuestions) continue;
        ask_for_lost(Milliseconds(0));
        last_asked = Clock::now();
      }
      return true;
    });
  }

 private:
  const HostsLayout& layout() const noexcept { return crossing_->layout; }
  bool leads() const { return layout().first_rank(crossing_->worker) == rank_; }
  bool is_alone() const noexcept { return up_->size() == 1; }  // on its host: all its memory is seen
  bool has_one_group() const noexcept { return crossing_->exchange == crossing_->results; }
  hosts::Carrying carrying() const {
    return {.layout = layout(),
            .rank = rank_,
            .host = layout().host_of_worker(crossing_->worker),
            .stripe = leads() ? layout().stripe_of(crossing_->worker) : -1};
  }
  bool is_done(const Stages& stages) const noexcept { return next_[Stages::taking] > stages.number; }

  // Jobs over `most` elements of a one-dimensional tensor each. The last one's Work.
  template <class Make>
  Work in_pieces(const at::Tensor& tensor, int64_t most, bool uses_scratch, const Make& make) {
    Work work;
    for (int64_t begin = 0; begin < tensor.numel(); begin += most) {
      work = add(make(tensor.narrow(0, begin, std::min(most, tensor.numel() - begin))), uses_scratch);
    }
    return work;
  }

  // Of the next job that uses some.
  at::Tensor scratch(int64_t bytes) const { return scratches_[scratch_jobs_ % kScratches].memory.narrow(0, 0, bytes); }

  Work add(std::unique_ptr<Job> job, bool uses_scratch) {
    if (failure_) std::rethrow_exception(failure_);
    auto stages = std::make_shared<Stages>();
    stages->owner = shared_from_this();
    stages->job = std::move(job);
    stages->number = added_++;
    if (uses_scratch) stages->before = std::exchange(scratches_[scratch_jobs_++ % kScratches].user, stages->number);
    under_way_.push_back(stages);
    advance(*stages);
    return Work(std::move(stages));
  }

  // Begins what may be begun, until nothing more may.
  void run() {
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (int stage = 0; stage < Stages::num_stages; ++stage) {
        for (auto next = due(stage); next != nullptr && may_begin(*next, stage); next = due(stage)) {
          begin(*next, stage);
          has_moved = true;
        }
      }
    }
  }

  // The job whose turn it is at a stage; null where there is none yet.
  std::shared_ptr<Stages> due(int stage) const {
    const uint64_t number = next_[static_cast<size_t>(stage)];
    return number < added_ ? under_way_[number - next_[Stages::taking]] : nullptr;
  }

  bool may_begin(Stages& stages, int stage) {
    if (stages.begun != stage || !stages.current.done()) return false;
    if (stage == Stages::reading) return !stages.before || next_[Stages::taking] > *stages.before;
    // In one group everything has one order.
    return stage != Stages::exchanging || !has_one_group() || next_[Stages::returning] == stages.number;
  }

  void begin(Stages& stages, int stage) {
    Job& job = *stages.job;
    stages.current = Work();
    switch (stage) {
      case Stages::reading:
        job.fill();
        if (is_alone()) {
          stages.memory = {job.memory().mutable_data_ptr()};
          job.read(stages.memory.data());
          break;
        }
        stages.current = up_->peer_memory()->visit(job.memory(), 0, [&stages, this](void* const* data) {
          stages.memory.assign(data, data + up_->size());
          stages.job->read(data);
        });
        break;
      case Stages::exchanging:
        if (leads()) stages.current = send(*crossing_->exchange, job.received, job.sent);
        break;
      case Stages::returning:
        job.work(stages.memory.data());
        if (leads() && job.has_return()) stages.current = send(*crossing_->results, job.returned_to_us, job.returned);
        break;
      case Stages::writing:
        job.write(stages.memory.data());
        if (!is_alone()) stages.current = down_->barrier();
        break;
      default:
        job.take();
    }
    ++stages.begun;
    if (stage == Stages::taking) under_way_.pop_front();  // `stages` lives on: run() holds it
    ++next_[static_cast<size_t>(stage)];
  }

  static Work send(C10dTransport& transport, const hosts::Parcels& to, const hosts::Parcels& from) {
    return transport.all_to_all(to.data(), from.data(), to.sizes(), from.sizes());
  }

  // Throws what those beside a lost worker told of it.
  void ask_for_lost(Milliseconds patience) {
    if (auto told = crossing_->lost ? crossing_->lost->ask(patience) : std::nullopt) throw PeerLost(*std::move(told));
  }

  void throw_found(std::optional<PeerLost> lost) {
    if (!lost) return;
    crossing_->lost->tell(*lost);
    throw *std::move(lost);
  }

  // Throws what ended one of the host's groups: a rank that waits for other hosts does not look at them otherwise.
  void check_hosts_groups() {
    for (auto* const group : {up_.get(), down_.get()}) {
      if (!group->peer_memory()->has_ended()) continue;
      group->peer_memory()->begin_stores();
      group->peer_memory()->end_stores();  // not reached
    }
  }

  // What a process group says of a connection that ended is PeerLost.
  template <class F>
  bool with_word_of_lost(const F& call) {
    try {
      return call();
    } catch (const PeerLost& lost) {
      if (crossing_->lost) crossing_->lost->tell(lost);
      throw;
    } catch (const Timeout&) {
      if (crossing_->lost) throw_found(crossing_->lost->find_silent());
      throw;
    } catch (const CommError& error) {
      check_hosts_groups();
      // Whatever words the process group has for it: those beside a lost worker know.
      ask_for_lost(kPatienceForWord);
      if (!is_of_connection(error.what())) throw;
      if (crossing_->lost) {
        auto found = crossing_->lost->find_ended();
        ask_for_lost(Milliseconds(0));  // they know more than that there is no sign of life
        throw_found(std::move(found));
      }
      throw PeerLost(-1, std::string("a worker on another host ended, or its host cannot be reached any more (") +
                             error.what() + "). Look at the logs there; start the job again from the last checkpoint");
    }
  }

  // What fails between hosts must not leave this host's other ranks waiting, nor this transport and what it holds to
  // the jobs that it will not finish.
  template <class F>
  bool guarded(const F& call) {
    if (failure_) std::rethrow_exception(failure_);
    try {
      return with_word_of_lost(call);
    } catch (const Error& error) {
      up_->peer_memory()->end(error);
      down_->peer_memory()->end(error);
      give_up(error.what());
      throw;
    } catch (...) {
      abort("a wait for other hosts was interrupted");
      give_up("a wait for other hosts was interrupted");
      throw;
    }
  }

  void give_up(const std::string& reason) noexcept {
    failure_ = std::current_exception();
    crossing_->exchange->abort(reason);
    crossing_->results->abort(reason);
    under_way_.clear();
  }

  const std::shared_ptr<const Crossing> crossing_;
  const int rank_;
  const CommunicatorPtr up_;
  const CommunicatorPtr down_;
  struct Scratch {
    at::Tensor memory;
    std::optional<uint64_t> user;  // the number of the last job that has it
  };
  std::array<Scratch, kScratches> scratches_;
  uint64_t scratch_jobs_ = 0;
  std::deque<std::shared_ptr<Stages>> under_way_;  // the first is the next one to be taken
  std::exception_ptr failure_;
  uint64_t added_ = 0;
  std::array<uint64_t, Stages::num_stages> next_{};  // the number of the job that is next at each stage
};

bool Stages::advance() { return owner->advance(*this); }
void Stages::wait(Milliseconds timeout) { owner->wait(*this, timeout); }

}  // namespace

std::vector<CommunicatorPtr> make_over_hosts(const HostsLayout& layout, int worker, HostsParts parts, bool check,
                                             Milliseconds timeout) {
  const c10::Device cpu(c10::kCPU);
  const auto exchange = std::make_shared<C10dTransport>(parts.exchange, cpu, parts.may_abort);
  const auto results = parts.results == parts.exchange
                           ? exchange
                           : std::make_shared<C10dTransport>(std::move(parts.results), cpu, parts.may_abort);
  const auto crossing =
      std::make_shared<const Crossing>(Crossing{layout, worker, exchange, results, std::move(parts.lost)});
  std::vector<CommunicatorPtr> handles;
  for (size_t r = 0; r < parts.up.size(); ++r) {
    const int rank = layout.first_rank(worker) + static_cast<int>(r);
    auto transport = std::make_shared<OverHosts>(crossing, rank, parts.up[r], parts.down[r]);
    handles.push_back(make_exchange_communicator(std::move(transport), check, timeout));
  }
  return handles;
}

}  // namespace muster::comm
