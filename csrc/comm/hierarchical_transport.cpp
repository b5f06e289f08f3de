#include <ATen/ops/zeros.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <functional>
#include <string>

#include "comm/c10d/transport.h"

namespace muster::comm {
namespace {

using Clock = std::chrono::steady_clock;

/// What the replicas of one process share.
struct Process {
  std::vector<int> first_replica;  // by worker; one more at the end
  int worker = 0;
  int most_replicas = 0;
  std::shared_ptr<C10dTransport> across;  // used by the first replica alone
};

class Hierarchical;

/// A collective as a sequence of steps, each a collective of one of the groups involved.
struct Chain final : Work::Impl {
  using Step = std::function<Work()>;

  bool advance() override;
  void wait(Milliseconds timeout) override;

  std::shared_ptr<Hierarchical> owner;
  std::vector<Step> steps;
  size_t issued = 0;
  uint64_t number = 0;
  Work current;
};

/// One replica's transport: up within the process, across by its first replica, down again. Going up and coming down
/// have a local group each: a replica may be several operations ahead on its way up.
class Hierarchical final : public Transport, public std::enable_shared_from_this<Hierarchical> {
 public:
  Hierarchical(std::shared_ptr<const Process> process, int replica, CommunicatorPtr up, CommunicatorPtr down)
      : process_(std::move(process)), replica_(replica), up_(std::move(up)), down_(std::move(down)) {}

  int rank() const noexcept override { return first_replica(process_->worker) + replica_; }
  int size() const noexcept override { return process_->first_replica.back(); }
  c10::Device device() const noexcept override { return c10::Device(c10::kCPU); }
  int worker_of(int rank) const noexcept override {
    const std::vector<int>& first = process_->first_replica;
    return static_cast<int>(std::upper_bound(first.begin(), first.end(), rank) - first.begin()) - 1;
  }

  Work all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    return start([=, this] { return up_->all_reduce(tensor, op, 0, {replica_ == 0}); },
                 [=, this] { return process_->across->all_reduce(tensor, op); },
                 [=, this] { return down_->broadcast(tensor, 0); });
  }

  Work broadcast(const at::Tensor& tensor, int source) override {
    const int worker = worker_of(source);
    const int replica = source - first_replica(worker);
    return start([=, this] { return worker == process_->worker ? up_->broadcast(tensor, replica) : Work(); },
                 [=, this] { return process_->across->broadcast(tensor, worker); },
                 [=, this] { return down_->broadcast(tensor, 0); });
  }

  // Processes exchange blocks of one size, as many rows as the largest process has replicas.
  Work gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input) override {
    const int workers = static_cast<int>(process_->first_replica.size()) - 1;
    const int most = process_->most_replicas;
    const at::Tensor all = at::zeros({workers, most, input.numel()}, input.options());
    const auto gathered = std::make_shared<Work>();
    return start(
        [=, this] {
          *gathered = up_->all_gather(input);
          return *gathered;
        },
        [=, this] {
          const at::Tensor block = at::zeros({most, input.numel()}, input.options());
          const std::vector<at::Tensor> parts = gathered->outputs();
          for (size_t i = 0; i < parts.size(); ++i) block.select(0, static_cast<int64_t>(i)).copy_(parts[i]);
          std::vector<at::Tensor> blocks;
          for (int w = 0; w < workers; ++w) blocks.push_back(all.select(0, w).view({-1}));
          return process_->across->gather(blocks, block.view({-1}));
        },
        [=, this] { return down_->broadcast(all, 0); },
        [=, this] {
          for (int r = 0; r < size(); ++r) {
            const int w = worker_of(r);
            const at::Tensor& output = outputs[static_cast<size_t>(r)];
            output.copy_(all.select(0, w).select(0, r - first_replica(w)));
          }
          return Work();
        });
  }

  void abort(const std::string& reason) noexcept override {
    up_->abort(reason);
    down_->abort(reason);
    process_->across->abort(reason);
  }

  bool advance(const Chain& chain) {
    return guarded([&] {
      run();
      return is_done(chain);
    });
  }

  void wait(const Chain& chain, Milliseconds timeout) {
    const auto deadline = Clock::now() + timeout;
    guarded([&] {
      for (run(); !is_done(chain); run()) {
        under_way_.front()->current.wait(
            std::max(Milliseconds(0), std::chrono::ceil<Milliseconds>(deadline - Clock::now())));
      }
      return true;
    });
  }

 private:
  int first_replica(int worker) const noexcept { return process_->first_replica[static_cast<size_t>(worker)]; }
  bool is_done(const Chain& chain) const { return under_way_.empty() || under_way_.front()->number > chain.number; }

  // Steps of earlier chains are issued before those of later ones, in every group.
  void run() {
    while (!under_way_.empty()) {
      const std::shared_ptr<Chain> front = under_way_.front();
      if (!front->current.done()) break;
      if (front->issued < front->steps.size()) {
        front->current = front->steps[front->issued++]();
      } else {
        under_way_.pop_front();
      }
    }
  }

  // What fails across must not leave this process's other replicas waiting, nor this transport to the chains that it
  // will not finish.
  template <class F>
  bool guarded(const F& call) {
    if (failure_) std::rethrow_exception(failure_);
    try {
      return call();
    } catch (const Error& error) {
      give_up(error.what());
      throw;
    } catch (...) {
      give_up("a wait for other workers was interrupted");
      throw;
    }
  }

  void give_up(const std::string& reason) noexcept {
    failure_ = std::current_exception();
    up_->abort(reason);
    down_->abort(reason);
    under_way_.clear();
  }

  // The way up goes out at once; the rest follows as the chain is advanced.
  Work start(const Chain::Step& up, const Chain::Step& across, const Chain::Step& down, const Chain::Step& last = {}) {
    if (failure_) std::rethrow_exception(failure_);
    auto chain = std::make_shared<Chain>();
    chain->owner = shared_from_this();
    chain->number = started_++;
    chain->current = up();
    if (replica_ == 0) chain->steps.push_back(across);
    chain->steps.push_back(down);
    if (last) chain->steps.push_back(last);
    under_way_.push_back(chain);
    advance(*chain);
    return Work(std::move(chain));
  }

  const std::shared_ptr<const Process> process_;
  const int replica_;
  const CommunicatorPtr up_;
  const CommunicatorPtr down_;
  std::deque<std::shared_ptr<Chain>> under_way_;
  std::exception_ptr failure_;
  uint64_t started_ = 0;
};

bool Chain::advance() { return owner->advance(*this); }
void Chain::wait(Milliseconds timeout) { owner->wait(*this, timeout); }

}  // namespace

std::vector<CommunicatorPtr> make_hierarchical(ProcessGroupPtr group, int replicas, const C10dOptions& options) {
  if (!options.device.is_cpu())
    throw InvalidArgument(
        "several replicas in a process over a process group need the CPU; use one process per device");
  auto process = std::make_shared<Process>();
  process->across = std::make_shared<C10dTransport>(std::move(group), options.device);
  process->worker = process->across->rank();
  const int workers = process->across->size();
  std::vector<at::Tensor> counts;
  for (int w = 0; w < workers; ++w) counts.push_back(at::zeros({1}, at::kLong));
  const at::Tensor mine = at::zeros({1}, at::kLong).fill_(replicas);
  process->across->gather(counts, mine).wait(options.timeout);
  process->first_replica.push_back(0);
  for (const at::Tensor& count : counts) {
    const int n = static_cast<int>(count.item<int64_t>());
    process->most_replicas = std::max(process->most_replicas, n);
    process->first_replica.push_back(process->first_replica.back() + n);
  }
  const std::vector<CommunicatorPtr> up = make_local(replicas, options.timeout);
  const std::vector<CommunicatorPtr> down = make_local(replicas, options.timeout);
  std::vector<CommunicatorPtr> handles;
  for (int r = 0; r < replicas; ++r) {
    const auto i = static_cast<size_t>(r);
    auto transport = std::make_shared<Hierarchical>(process, r, up[i], down[i]);
    handles.push_back(make_exchange_communicator(std::move(transport), options.check, options.timeout));
  }
  return handles;
}

}  // namespace muster::comm
