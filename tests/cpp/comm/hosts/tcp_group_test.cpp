#include "comm/hosts/tcp_group.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "cpp/catch.h"
#include "muster/error.h"
#include "net/rendezvous.h"
#include "net/tcp.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::comm;
using namespace muster::testing;
using Sizes = std::vector<int64_t>;

namespace {

// What a rank does, with the group of all.
using Exchanging = std::function<void(int rank, c10d::Backend& group)>;

// Ranks as threads, whose groups end with them.
std::string run_tcp(int size, const Exchanging& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  return run_threads(size, [&](int rank) {
    TcpPlace place{rank, size, {}, "127.0.0.1"};
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) place.peers.push_back(peer);
    }
    const auto group = make_tcp_group(*store, place, Seconds(30));
    body(rank, *group->getBackend(c10::DeviceType::CPU));
  });
}

c10::intrusive_ptr<c10d::Work> begin(c10d::Backend& group, at::Tensor output, at::Tensor input, Sizes out, Sizes in) {
  return group.alltoall_base(output, input, out, in);
}

// The text of what a call throws; empty where it returns.
template <class F>
std::string error_of(const F& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("exchanges over TCP bring each rank what is meant for it, in order", "[comm][hosts]") {
  constexpr int kRanks = 3;
  CHECK(run_tcp(kRanks, [&](int rank, c10d::Backend& group) {
          for (const int64_t most : {int64_t{0}, int64_t{1}, int64_t{1} << 21}) {
            std::vector<c10::intrusive_ptr<c10d::Work>> works;  // several under way
            std::vector<at::Tensor> outputs;
            for (int round = 0; round < 5; ++round) {
              // Rank a sends b * most + a elements to rank b: none to 0 from 0.
              Sizes in, out;
              for (int other = 0; other < kRanks; ++other) {
                in.push_back(other * most + rank);
                out.push_back(rank * most + other);
              }
              const int64_t sent = in[0] + in[1] + in[2];
              outputs.push_back(at::empty({out[0] + out[1] + out[2]}, at::kInt));
              works.push_back(begin(group, outputs.back(), at::full({sent}, 10 * rank + round, at::kInt), out, in));
            }
            for (int round = 0; round < 5; ++round) {
              works[static_cast<size_t>(round)]->wait();
              int64_t place = 0;
              for (int other = 0; other < kRanks; ++other) {
                const int64_t size = rank * most + other;
                const auto part = outputs[static_cast<size_t>(round)].narrow(0, place, size);
                MUSTER_CHECK(part.eq(10 * other + round).all().item<bool>());
                place += size;
              }
            }
          }
        }) == "");
}

TEST_CASE("an exchange over TCP waits for no rank that has nothing in it", "[comm][hosts]") {
  std::atomic<bool> is_through = false;
  CHECK(run_tcp(3, [&](int rank, c10d::Backend& group) {
          if (rank == 2) {
            while (!is_through) std::this_thread::yield();
          }
          const auto values = at::full({4}, rank, at::kFloat);
          const auto output = at::empty({rank == 2 ? 0 : 4}, at::kFloat);
          const Sizes sizes = rank == 0 ? Sizes{0, 4, 0} : rank == 1 ? Sizes{4, 0, 0} : Sizes{0, 0, 0};
          begin(group, output, rank == 2 ? values.narrow(0, 0, 0) : values, sizes, sizes)->wait();
          if (rank == 0) is_through = true;
        }) == "");
}

TEST_CASE("ranks that disagree about an exchange over TCP are told", "[comm][hosts]") {
  std::array<std::string, 2> errors;
  CHECK(run_tcp(2, [&](int rank, c10d::Backend& group) {
          const int64_t size = rank == 0 ? 4 : 5;
          const auto values = at::full({size}, rank, at::kFloat);
          const Sizes sizes = rank == 0 ? Sizes{0, size} : Sizes{size, 0};
          const auto work = begin(group, values.clone(), values, sizes, sizes);
          errors[static_cast<size_t>(rank)] = error_of([&] { work->wait(); });
          MUSTER_CHECK(!work->isSuccess());
          MUSTER_CHECK(error_of([&] { begin(group, values.clone(), values, sizes, sizes)->wait(); }) ==
                       errors[static_cast<size_t>(rank)]);
        }) == "");
  // Who finds it first ends its connections.
  CHECK_THAT(errors[0] + errors[1], ContainsSubstring("of exchange 0 were expected; call the same collectives"));
  for (const auto& error : errors) CHECK_THAT(error, ContainsSubstring("the connection to worker"));
}

TEST_CASE("a group over TCP that ends fails what waits for it", "[comm][hosts]") {
  std::string error;
  CHECK(run_tcp(2, [&](int rank, c10d::Backend& group) {
          if (rank == 1) return;
          const auto work = begin(group, at::empty({1}, at::kFloat), at::empty({0}, at::kFloat), {0, 1}, {0, 0});
          error = error_of([&] { work->wait(); });
        }) == "");
  CHECK(error == "the connection to worker 1 was closed by peer");
}

TEST_CASE("what was begun on a group over TCP fails with its end", "[comm][hosts]") {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::atomic<bool> has_left = false;
  CHECK(run_tcp(2, [&](int rank, c10d::Backend& group) {
          if (rank == 1) {
            while (!has_left) std::this_thread::yield();
            return;
          }
          for (int i = 0; i < 2; ++i) {
            works.push_back(begin(group, at::empty({1}, at::kFloat), at::empty({0}, at::kFloat), {0, 1}, {0, 0}));
          }
          MUSTER_CHECK(!error_of([&] { works[0]->wait(std::chrono::milliseconds(10)); }).empty());
          MUSTER_CHECK(!works[0]->isCompleted());
          has_left = true;
        }) == "");
  for (const auto& work : works) CHECK_THAT(error_of([&] { work->wait(); }), ContainsSubstring("were ended here"));
}

TEST_CASE("a group over TCP that is aborted fails what waits for it, here and at its peers", "[comm][hosts]") {
  CHECK(run_tcp(2, [&](int rank, c10d::Backend& group) {
          const auto work = begin(group, at::empty({1}, at::kFloat), at::empty({0}, at::kFloat),
                                  rank == 0 ? Sizes{0, 1} : Sizes{1, 0}, {0, 0});
          if (rank == 0) group.abort();
          const auto error = error_of([&] { work->wait(); });
          MUSTER_CHECK(error.find(rank == 0 ? "were ended here" : "closed by peer") != std::string::npos);
        }) == "");
}

TEST_CASE("a rank over TCP that is killed is missed at once, whatever it has forked", "[comm][hosts]") {
  const auto address = free_address();
  constexpr unsigned kLivesOn = 8;  // seconds, of the child
  CHECK(run_processes(2, [&](int rank) {
          Cluster cluster;
          cluster.rank = rank;
          cluster.num_workers = 2;
          cluster.address = address;
          const auto store = net::open_store(cluster, Seconds(30));
          const auto group = make_tcp_group(*store, {rank, 2, {1 - rank}, "127.0.0.1"}, Seconds(30));
          if (rank == 1) {
            if (::fork() == 0) {
              ::sleep(kLivesOn);
              ::_exit(0);
            }
            ::kill(::getpid(), SIGKILL);
          }
          const auto began = std::chrono::steady_clock::now();
          const auto work = begin(*group->getBackend(c10::DeviceType::CPU), at::empty({1}, at::kFloat),
                                  at::empty({0}, at::kFloat), {0, 1}, {0, 0});
          MUSTER_CHECK(contains(error_of([&] { work->wait(Seconds(30)); }), "the connection to worker 1 was closed"));
          MUSTER_CHECK(std::chrono::steady_clock::now() - began < Seconds(kLivesOn) / 2);
        }) == "");
}

TEST_CASE("a forked child lets go of a group over TCP, and its parent goes on", "[comm][hosts]") {
  CHECK(run_tcp(2, [&](int rank, c10d::Backend& group) {
          const auto exchange = [&] {
            const auto into = at::empty({1}, at::kFloat);
            const auto of_peer = rank == 0 ? Sizes{0, 1} : Sizes{1, 0};
            begin(group, into, at::full({1}, rank, at::kFloat), of_peer, of_peer)->wait();
            return into.item<float>() == static_cast<float>(1 - rank);
          };
          MUSTER_CHECK(exchange());
          if (rank == 0) {
            const pid_t child = ::fork();
            if (child == 0) {
              auto* const own = &group;
              own->~Backend();
              ::_exit(0);
            }
            int status = 1;
            MUSTER_CHECK(::waitpid(child, &status, 0) == child);
            MUSTER_CHECK(status == 0);
          }
          MUSTER_CHECK(exchange());
        }) == "");
}

TEST_CASE("a rank without peers exchanges with itself", "[comm][hosts]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto group = make_tcp_group(*store, {1, 3, {}, "127.0.0.1"}, Seconds(1));
  auto output = at::empty({2}, at::kFloat);
  begin(*group->getBackend(c10::DeviceType::CPU), output, at::full({2}, 5, at::kFloat), {0, 2, 0}, {0, 2, 0})->wait();
  CHECK(output.eq(5).all().item<bool>());
}

TEST_CASE("strangers do not join a group over TCP, and who is missing is named", "[comm][hosts]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::string missing;
  const auto errors = run_threads(2, [&](int rank) {
    if (rank == 0) {
      missing = error_of([&] { make_tcp_group(*store, {0, 2, {1}, "127.0.0.1"}, std::chrono::milliseconds(600)); });
      return;
    }
    net::set_text(*store, "tcp/1", "127.0.0.1 1 word");
    const auto texts = net::get_texts(*store, {"tcp/0"}, {"worker 0"}, Seconds(30));
    const std::string port = texts[0].substr(10, texts[0].find(' ', 10) - 10);
    std::string why;
    const auto addresses = net::resolve({"127.0.0.1", port}, why);
    int error = 0;
    const auto fd = net::try_to_connect(*addresses, net::Deadline::max(), error, [] {});
    MUSTER_CHECK(fd);
    const std::string wrong(36, '\1');
    MUSTER_CHECK(::send(fd.get(), wrong.data(), wrong.size(), MSG_NOSIGNAL) == 36);
    char byte = 0;
    MUSTER_CHECK(net::wait_readable({fd.get()}, net::Deadline::max()));
    MUSTER_CHECK(::recv(fd.get(), &byte, 1, 0) <= 0);
  });
  CHECK(errors == "");
  CHECK_THAT(missing, ContainsSubstring("connections of worker 1 to 127.0.0.1"));
  CHECK_THAT(error_of([&] { make_tcp_group(*store, {1, 2, {0}, "192.0.2.1"}, Seconds(1)); }),
             ContainsSubstring("cannot listen at 192.0.2.1"));
}

TEST_CASE("an exchange over TCP takes what it can carry alone", "[comm][hosts]") {
  CHECK(run_tcp(2, [&](int rank, c10d::Backend& group) {
          if (rank == 1) return;
          const auto square = at::empty({2, 2}, at::kFloat);
          MUSTER_CHECK(!error_of([&] { begin(group, square.t(), square, {0, 2}, {0, 2}); }).empty());
          MUSTER_CHECK(!error_of([&] { begin(group, square, square, {2}, {2}); }).empty());
          MUSTER_CHECK(!error_of([&] { begin(group, square, square, {0, 3}, {0, 2}); }).empty());
          MUSTER_CHECK(!error_of([&] { begin(group, square, square, {-1, 3}, {0, 2}); }).empty());
          MUSTER_CHECK(!error_of([&] { begin(group, square, square.clone(), {2, 0}, {1, 1}); }).empty());
        }) == "");
}
