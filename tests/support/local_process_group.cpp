#include "support/local_process_group.h"

#include <thread>

namespace muster::testing {
namespace {

class LocalWork final : public c10d::Work {
 public:
  explicit LocalWork(comm::Work work, std::function<void()> after = {})
      : work_(std::move(work)), after_(std::move(after)) {}

  bool isCompleted() override {
    try {
      if (!is_done_ && !error_ && work_.done()) {
        is_done_ = true;
        if (after_) after_();
      }
    } catch (const std::exception&) {
      error_ = std::current_exception();
    }
    return is_done_ || error_;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool is_bounded = timeout.count() > 0;
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!isCompleted()) {
      if (is_bounded && std::chrono::steady_clock::now() > deadline) throw std::runtime_error("Operation timed out!");
      std::this_thread::yield();
    }
    if (error_) std::rethrow_exception(error_);
    return true;
  }

 private:
  comm::Work work_;
  std::function<void()> after_;
  bool is_done_ = false;
  std::exception_ptr error_;
};

class LocalBackend final : public c10d::Backend {
 public:
  explicit LocalBackend(comm::CommunicatorPtr communicator)
      : Backend(communicator->rank(), communicator->size()), communicator_(std::move(communicator)) {}

  const std::string getBackendName() const override { return "local"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    const ReduceOp op = options.reduceOp == c10d::ReduceOp::SUM   ? ReduceOp::sum
                        : options.reduceOp == c10d::ReduceOp::MIN ? ReduceOp::min
                                                                  : ReduceOp::max;
    return c10::make_intrusive<LocalWork>(communicator_->all_reduce(tensors[0], op));
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return c10::make_intrusive<LocalWork>(communicator_->broadcast(tensors[0], static_cast<int>(options.rootRank)));
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions&) override {
    comm::Work work = communicator_->all_gather(inputs[0]);
    return c10::make_intrusive<LocalWork>(work, [work, results = outputs[0]]() mutable {
      const std::vector<at::Tensor> parts = work.outputs();
      for (size_t r = 0; r < results.size(); ++r) results[r].copy_(parts[r]);
    });
  }

 private:
  const comm::CommunicatorPtr communicator_;
};

}  // namespace

comm::ProcessGroupPtr make_process_group(comm::CommunicatorPtr communicator) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(communicator->rank(), communicator->size());
  c10::intrusive_ptr<c10d::Backend> backend = c10::make_intrusive<LocalBackend>(std::move(communicator));
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

std::string C10d::run(int size, const Body& body, comm::Milliseconds timeout) {
  const std::vector<comm::CommunicatorPtr> ranks = comm::make_local(size, Seconds(60));
  return run_threads(size, [&](int rank) {
    comm::C10dOptions options;
    options.check = true;
    options.timeout = timeout;
    const comm::CommunicatorPtr handle = comm::make_c10d(make_process_group(ranks[static_cast<size_t>(rank)]), options);
    body(*handle);
  });
}

std::string Hierarchical::run(int size, const Body& body, comm::Milliseconds timeout) {
  const std::vector<comm::CommunicatorPtr> workers = comm::make_local(2, Seconds(60));
  return run_threads(2, [&](int worker) {
    comm::C10dOptions options;
    options.check = true;
    options.timeout = timeout;
    const int replicas = worker == 0 ? (size + 1) / 2 : size / 2;
    std::vector<comm::CommunicatorPtr> handles =
        comm::make_hierarchical(make_process_group(workers[static_cast<size_t>(worker)]), replicas, options);
    const std::string failures = run_threads(replicas, [&](int r) { body(*handles[static_cast<size_t>(r)]); });
    if (!failures.empty()) throw CheckFailed(failures);
  });
}

}  // namespace muster::testing
