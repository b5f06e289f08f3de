#include "support/local_process_group.h"

#include <ATen/ops/tensor.h>

#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/hosts/tcp_group.h"

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
  // Everybody sees everything, and takes what is meant for it.
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& sizes_out,
                                               std::vector<int64_t>& sizes_in, const c10d::AllToAllOptions&) override {
    comm::Work sizes = communicator_->all_gather(at::tensor(sizes_in));
    comm::Work data = communicator_->all_gather(input);
    return c10::make_intrusive<LocalWork>(data, [this, sizes, data, output, sizes_out]() mutable {
      sizes.wait();
      const auto all_sizes = sizes.outputs();
      const auto parts = data.outputs();
      int64_t place = 0;
      for (size_t r = 0; r < parts.size(); ++r) {
        const auto* const theirs = all_sizes[r].const_data_ptr<int64_t>();
        const int64_t begin = std::accumulate(theirs, theirs + getRank(), int64_t{0});
        if (theirs[getRank()] != sizes_out[r]) throw std::runtime_error("ranks disagree about sizes of all_to_all");
        output.narrow(0, place, sizes_out[r]).copy_(parts[r].narrow(0, begin, sizes_out[r]));
        place += sizes_out[r];
      }
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

std::string OverHosts::run(int size, const Body& body, comm::Milliseconds timeout) {
  const OverHostsPlan plan{.host_of_worker = size > 2 ? std::vector<int>{0, 1, 0} : std::vector<int>{0, 1},
                           .replicas_of_worker = {}};
  return run_over_hosts(plan, size, body, timeout, /*check=*/true);
}

std::string run_over_hosts(OverHostsPlan plan, int size, const Body& body, comm::Milliseconds timeout, bool check) {
  const int workers = std::min(static_cast<int>(plan.host_of_worker.size()), size);
  plan.host_of_worker.resize(static_cast<size_t>(workers));
  if (plan.replicas_of_worker.empty()) {
    for (int w = 0; w < workers; ++w) plan.replicas_of_worker.push_back(size / workers + (w < size % workers ? 1 : 0));
  }
  const comm::HostsLayout layout(plan.replicas_of_worker, plan.host_of_worker);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto exchange = comm::make_local(workers, Seconds(60));
  const auto results = comm::make_local(workers, Seconds(60));
  std::vector<std::vector<comm::CommunicatorPtr>> up;
  std::vector<std::vector<comm::CommunicatorPtr>> down;
  for (int host = 0; host < layout.num_hosts(); ++host) {
    const auto ranks = static_cast<int>(layout.ranks_of_host(host).size());
    up.push_back(comm::make_local(ranks, Seconds(60)));
    down.push_back(comm::make_local(ranks, Seconds(60)));
  }
  return run_threads(workers, [&](int worker) {
    const auto host = static_cast<size_t>(layout.host_of_worker(worker));
    const auto make_group = [&](const std::string& name, const std::vector<comm::CommunicatorPtr>& local) {
      if (!plan.uses_tcp) return make_process_group(local[static_cast<size_t>(worker)]);
      c10d::PrefixStore prefixed(name, store);
      return comm::make_tcp_group(prefixed, {worker, workers, layout.fellow_carriers(worker), "127.0.0.1"},
                                  Seconds(60));
    };
    const auto group = make_group("exchange", exchange);
    comm::HostsParts parts{.exchange = group,
                           .results = plan.has_one_group ? group : make_group("results", results),
                           .up = {},
                           .down = {},
                           .lost = plan.lost};
    const auto& ranks = layout.ranks_of_host(static_cast<int>(host));
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (layout.worker_of(ranks[i]) != worker) continue;
      parts.up.push_back(up[host][i]);
      parts.down.push_back(down[host][i]);
    }
    const auto handles = comm::make_over_hosts(layout, worker, std::move(parts), check, timeout);
    const std::string failures =
        run_threads(static_cast<int>(handles.size()), [&](int r) { body(*handles[static_cast<size_t>(r)]); });
    if (!failures.empty()) throw CheckFailed(failures);
  });
}

}  // namespace muster::testing
