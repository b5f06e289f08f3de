// Life and death of the processes of a host group.
#include "comm/shared/host_mesh.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "core/wait_hook.h"
#include "cpp/catch.h"
#include "cpp/comm/shared_value.h"
#include "net/rendezvous.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::comm;
using namespace muster::testing;

namespace {

using Clock = std::chrono::steady_clock;

// A step as a training loop has it: buckets in shared memory, private tensors, in-step collectives, a barrier.
void run_step(Communicator& c, at::Tensor& bucket, uint64_t step) {
  Work first = c.all_reduce(bucket, ReduceOp::max);
  at::Tensor own = at::full({700'000}, 1.0F);
  Work second = c.all_reduce(own, ReduceOp::max);
  second.wait();
  c.begin_scope(step);
  if (step % 3 == static_cast<uint64_t>(c.rank()) % 3) {
    c.end_scope(ScopeEnd::absent);
  } else {
    at::Tensor small = at::full({10}, 1.0F);
    c.all_reduce(small, ReduceOp::sum).wait();
    c.end_scope(ScopeEnd::finished);
  }
  first.wait();
  c.barrier().wait();
}

size_t leftovers() {
  size_t count = 0;
  for (const char* folder : {"/dev/shm", "/tmp"}) {
    for (const auto& entry :
         std::filesystem::directory_iterator(folder, std::filesystem::directory_options::skip_permission_denied)) {
      if (entry.path().filename().string().rfind("muster-", 0) == 0) ++count;
    }
  }
  return count;
}

// Kills `victim` some time after all ranks run steps; the others must name it in time.
std::string run_kill(int workers, int victim, std::chrono::microseconds delay) {
  struct State {
    std::atomic<int> running{0};
    std::atomic<int64_t> killed_at{0};
  };
  const SharedValue<State> state;
  const std::string address = free_address();
  return run_processes(
      workers,
      [&](int rank) {
        const CommunicatorPtr c = make_mesh(address, rank, workers)->make_group("test").front();
        at::Tensor bucket = c->allocate(300'000, at::kFloat);
        try {
          for (uint64_t step = 0;; ++step) {
            run_step(*c, bucket, step);
            if (step == 0) state->running.fetch_add(1);
          }
        } catch (const PeerLost& error) {
          const auto late = Clock::now() - Clock::time_point(Clock::duration(state->killed_at.load()));
          MUSTER_CHECK(error.rank() == victim);
          MUSTER_CHECK(contains(error.what(), "worker " + std::to_string(victim)));
          MUSTER_CHECK(late < Seconds(5));
        }
        message_of<PeerLost>([&] { c->barrier(); });
      },
      [&](const std::vector<pid_t>& pids) {
        const auto deadline = Clock::now() + Seconds(60);
        while (state->running.load() < workers && Clock::now() < deadline)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        std::this_thread::sleep_for(delay);
        state->killed_at.store(Clock::now().time_since_epoch().count());
        ::kill(pids[static_cast<size_t>(victim)], SIGKILL);
      });
}

void kill_at_random_points(unsigned seed, int runs) {
  std::mt19937 random(seed);
  const size_t before = leftovers();
  for (int run = 0; run < runs; ++run) {
    const int workers = 2 + static_cast<int>(random() % 3);
    const int victim = static_cast<int>(random()) % workers;
    const std::chrono::microseconds delay(random() % 20'000);
    INFO("seed " << seed << " run " << run);
    CHECK(run_kill(workers, std::abs(victim), delay) == "");
  }
  CHECK(leftovers() == before);
}

}  // namespace

TEST_CASE("a worker killed at a random point is named by every other within five seconds", "[comm]") {
  kill_at_random_points(1, 5);
}

TEST_CASE("kills, many", "[.][long]") {
  for (unsigned seed = 2; seed < 12; ++seed) kill_at_random_points(seed, 20);
}

TEST_CASE("a worker killed inside a barrier, and one that exits without a word", "[comm]") {
  const bool is_kill = GENERATE(true, false);
  const std::string address = free_address();
  CHECK(run_processes(3, [&](int rank) {
          const CommunicatorPtr c = make_mesh(address, rank, 3)->make_group("test").front();
          c->barrier().wait();
          if (rank == 1) {
            const Work work = c->barrier();
            if (is_kill) ::raise(SIGKILL);
            ::_exit(0);
          }
          const std::string text = message_of<PeerLost>([&] {
            for (;;) c->barrier().wait();
          });
          MUSTER_CHECK(contains(text, "worker 1 ended"));
        }) == "");
}

TEST_CASE("a dead worker is noticed although a forked child keeps its sockets open", "[comm]") {
  const std::string address = free_address();
  CHECK(run_processes(2, [&](int rank) {
          const CommunicatorPtr c = make_mesh(address, rank, 2)->make_group("test").front();
          c->barrier().wait();
          if (rank == 1) {
            if (::fork() == 0) {
              ::alarm(6);
              for (;;) ::pause();
            }
            ::raise(SIGKILL);
          }
          const auto start = Clock::now();
          message_of<PeerLost>([&] { c->barrier().wait(); });
          MUSTER_CHECK(Clock::now() - start < Seconds(4));
        }) == "");
}

TEST_CASE("a forked child that drops its copies disturbs nobody", "[comm]") {
  const std::string address = free_address();
  CHECK(run_processes(2, [&](int rank) {
          std::shared_ptr<HostMesh> mesh = make_mesh(address, rank, 2);
          CommunicatorPtr c = mesh->make_group("test").front();
          at::Tensor tensor = c->allocate(50'000, at::kFloat);
          tensor.fill_(rank + 1);
          c->barrier().wait();
          const pid_t child = ::fork();
          if (child == 0) {
            tensor.reset();
            c.reset();
            mesh.reset();
            ::_exit(0);
          }
          int status = 0;
          ::waitpid(child, &status, 0);
          MUSTER_CHECK(status == 0);
          c->all_reduce(tensor, ReduceOp::sum).wait();
          MUSTER_CHECK(tensor.eq(3).all().item<bool>());
        }) == "");
}

TEST_CASE("a worker that closes while another waits is PeerLost; one that ends after its last collective is not",
          "[comm]") {
  const std::string address = free_address();
  CHECK(run_processes(3, [&](int rank) {
          CommunicatorPtr c = make_mesh(address, rank, 3)->make_group("test").front();
          at::Tensor tensor = at::full({100'000}, 1.0F);
          const auto reduce = [&] { c->all_reduce(tensor, ReduceOp::sum).wait(); };
          if (rank == 2) return reduce();
          // The rank that waits for rank 2 may end the group before the other has looked at its first result.
          const std::string text = message_of<PeerLost>([&] {
            reduce();
            reduce();
          });
          MUSTER_CHECK(contains(text, "it closed its strategy"));
        }) == "");
  for (int run = 0; run < 5; ++run) {
    const std::string next = free_address();
    CHECK(run_processes(3, [&](int rank) {
            CommunicatorPtr c = make_mesh(next, rank, 3)->make_group("test").front();
            at::Tensor tensor = at::full({400'000}, 1.0F);
            c->all_reduce(tensor, ReduceOp::sum).wait();
            MUSTER_CHECK(tensor.eq(3).all().item<bool>());
            if (rank != 0) ::_exit(0);
          }) == "");
  }
}

TEST_CASE("several groups over one mesh, workers with different numbers of replicas", "[comm]") {
  const std::string address = free_address();
  CHECK(run_processes(2, [&](int worker) {
          const std::shared_ptr<HostMesh> mesh = make_mesh(address, worker, 2, worker == 0 ? 1 : 2);
          MUSTER_CHECK(mesh->num_replicas() == 3 && mesh->first_replica(1) == 1);
          MUSTER_CHECK(mesh->worker_of(0) == 0 && mesh->worker_of(1) == 1 && mesh->worker_of(2) == 1);
          std::vector<CommunicatorPtr> a = mesh->make_group("a");
          std::vector<CommunicatorPtr> b = mesh->make_group("b");
          const std::string failures = run_threads(static_cast<int>(a.size()), [&](int r) {
            const auto i = static_cast<size_t>(r);
            MUSTER_CHECK(a[i]->rank() == mesh->first_replica(worker) + r && a[i]->size() == 3);
            at::Tensor x = a[i]->allocate(9'000, at::kFloat).fill_(1);
            at::Tensor y = x.clone();
            Work first = a[i]->all_reduce(x, ReduceOp::sum);
            Work second = b[i]->all_reduce(y, ReduceOp::sum);
            second.wait();
            first.wait();
            MUSTER_CHECK(x.eq(3).all().item<bool>() && y.eq(3).all().item<bool>());
          });
          if (!failures.empty()) throw CheckFailed(failures);
        }) == "");
}

TEST_CASE("memory of tensors that are dropped returns, and tensors outlive their group", "[comm]") {
  const std::string address = free_address();
  CHECK(run_processes(2, [&](int rank) {
          CommunicatorPtr c = make_mesh(address, rank, 2)->make_group("test").front();
          at::Tensor kept = c->allocate(1'000'000, at::kFloat).fill_(rank + 1);
          const void* place = nullptr;
          for (int i = 0; i < 20; ++i) {
            const at::Tensor tensor = c->allocate(1'000'000, at::kFloat);
            MUSTER_CHECK(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 64 == 0);
            MUSTER_CHECK(tensor[1234].item<float>() == 0);
            tensor[1234] = 1;
            MUSTER_CHECK(place == nullptr || place == tensor.data_ptr());
            place = tensor.data_ptr();
          }
          c->all_reduce(kept, ReduceOp::sum).wait();
          c.reset();
          MUSTER_CHECK(kept.eq(3).all().item<bool>());
        }) == "");
}

TEST_CASE("workers of another host are refused with what to do", "[comm]") {
  c10d::HashStore store;
  net::set_text(store, "mesh/1", "muster-somewhere another-boot/1 1");
  HostMesh::Options options;
  options.num_workers = 2;
  options.timeout = Seconds(5);
  const std::string text = message_of<InvalidArgument>([&] { HostMesh::connect(store, options); });
  CHECK(contains(text, "process_group="));
  CHECK(contains(text, "workers 0 and 1"));
}

TEST_CASE("a worker that never comes is a Timeout that names it", "[comm]") {
  c10d::HashStore store;
  HostMesh::Options options;
  options.num_workers = 3;
  options.timeout = Milliseconds(100);
  CHECK(contains(message_of<Timeout>([&] { HostMesh::connect(store, options); }), "worker 1, worker 2"));
}

TEST_CASE("what a thread looks at while it waits ends the wait for others to meet", "[comm]") {
  struct Interrupted {};
  int calls = 0;
  const WaitHook hook([&] {
    if (++calls == 5) throw Interrupted();
  });
  c10d::HashStore store;
  HostMesh::Options options;
  options.num_workers = 2;
  const auto started = Clock::now();
  SECTION("nobody is there") { CHECK_THROWS_AS(HostMesh::connect(store, options), Interrupted); }
  SECTION("the other has said where it is, and does not call") {
    net::set_text(store, "mesh/1", "muster-somewhere " + net::host_identity() + " 1");
    CHECK_THROWS_AS(HostMesh::connect(store, options), Interrupted);
  }
  CHECK(Clock::now() - started < Seconds(5));
}

TEST_CASE("what a thread looks at while it waits ends the wait for what another sends", "[comm]") {
  struct Interrupted {};
  const std::string address = free_address();
  CHECK(run_threads(2, [&](int rank) {
          const auto mesh = make_mesh(address, rank, 2);
          if (rank == 0) {
            net::UnixListener("muster-test-" + net::random_name()).accept(Clock::now() + Seconds(1));  // is late
            return;
          }
          const WaitHook hook([] { throw Interrupted(); });
          try {
            mesh->share_memory(100);
          } catch (const Interrupted&) {
            return;
          }
          MUSTER_CHECK(false);
        }) == "");
}
