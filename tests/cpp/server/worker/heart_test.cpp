#include "server/worker/heart.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/wait_hook.h"
#include "cpp/catch.h"
#include "muster/error.h"
#include "net/unix_socket.h"
#include "server/protocol/protocol.h"
#include "server/worker/link.h"
#include "support/run_ranks.h"
#include "support/servers.h"

using namespace muster;
using namespace muster::server;
using std::chrono::milliseconds;

namespace {

net::Deadline in(milliseconds duration) { return Surroundings::Clock::now() + duration; }

int count_hearts() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    count += name == "muster-heart" ? 1 : 0;
  }
  return count;
}

// Greets on all connections, and counts signs of life by rank and how long after the one before they came.
class Listener {
 public:
  explicit Listener(std::string name) : listener_(net::listen_on_host(name)), thread_([this] { serve(); }) {}
  ~Listener() {
    ends_ = true;
    thread_.join();
  }

  int beats() const { return beats_; }
  milliseconds longest_gap() const { return milliseconds(longest_gap_); }

 private:
  void serve() {
    while (!ends_) {
      if (auto channel = listener_->accept(in(milliseconds(1)))) channels_.push_back(std::move(channel));
      for (auto& channel : channels_) {
        try {
          if (channel && channel->wait_input(Surroundings::Clock::now()) && !answer(*channel)) channel.reset();
        } catch (const CommError&) {  // it ended before it was answered
          channel.reset();
        }
      }
    }
  }

  bool answer(net::Channel& channel) {
    net::Frame frame;
    const auto deadline = in(milliseconds(5'000));
    if (!channel.receive(frame, deadline)) return false;
    if (frame.type == Hello::kType) {
      channel.send(Welcome::kType, encode(Welcome{7, 42}), {}, deadline);
      return true;
    }
    const auto now = Surroundings::Clock::now();
    const auto gap = std::chrono::duration_cast<milliseconds>(now - last_).count();
    if (beats_ > 0) longest_gap_ = std::max<int64_t>(longest_gap_, gap);
    last_ = now;
    ++beats_;
    channel.send(Beaten::kType, encode(Beaten{}), {}, deadline);
    return true;
  }

  const std::unique_ptr<net::ChannelListener> listener_;
  std::vector<std::unique_ptr<net::Channel>> channels_;
  net::Deadline last_;
  std::atomic<bool> ends_{false};
  std::atomic<int> beats_{0};
  std::atomic<int64_t> longest_gap_{0};
  std::thread thread_;
};

std::string new_name() { return "muster-test-" + net::random_name(); }

std::unique_ptr<Link> connected(const std::string& name, milliseconds heartbeat) {
  auto link = std::make_unique<Link>(Link::Config{.name = name, .rank = 0, .lanes = 1, .heartbeat = heartbeat});
  link->connect(0, nullptr, WaitHook::call);
  link->keep_alive();
  return link;
}

// A pulse that is ticked as long as it lives.
struct Beating {
  Beating(const std::string& name, milliseconds heartbeat, std::atomic<int>& ends)
      : pulse({name, 0, heartbeat}, *Surroundings::of_process(), [&ends](const std::string&) { ++ends; }) {
    pulse.note_welcome(1);
    Surroundings::of_process()->start(pulse);
  }
  ~Beating() { Surroundings::of_process()->stop(pulse); }

  Pulse pulse;
};

void wait_for(const std::function<bool()>& condition) {
  const auto deadline = in(milliseconds(20'000));
  while (!condition()) {
    MUSTER_CHECK(Surroundings::Clock::now() < deadline);
    std::this_thread::sleep_for(milliseconds(1));
  }
}

}  // namespace

TEST_CASE("one thread beats for all links of a process, as long as there is one", "[server]") {
  CHECK(count_hearts() == 0);
  for (int round = 0; round < 3; ++round) {
    constexpr int kServers = 20;
    std::map<std::string, std::unique_ptr<Listener>> listeners;
    std::vector<std::unique_ptr<Link>> links;
    for (int i = 0; i < kServers; ++i) {
      const auto name = new_name();
      listeners[name] = std::make_unique<Listener>(name);
      links.push_back(connected(name, milliseconds(500)));
    }
    for (const auto& [name, listener] : listeners) {
      wait_for([&] { return listener->beats() >= 3; });
    }
    CHECK(count_hearts() == 1);
    while (links.size() > 1) links.pop_back();
    CHECK(count_hearts() == 1);
    CHECK_FALSE(links[0]->is_broken());
    links.clear();
    CHECK(count_hearts() == 0);
  }
}

TEST_CASE("servers that do not accept, greet or answer delay nobody's signs of life", "[server]") {
  constexpr milliseconds kHeartbeat{2'000};
  const auto lively = new_name(), full = new_name(), deaf = new_name();
  Listener listener(lively);
  std::atomic<int> ends{0};
  std::vector<std::unique_ptr<Beating>> silent;
  const auto deaf_socket = net::listen_at(deaf, SOCK_STREAM);
  const auto full_socket = net::listen_at(full, SOCK_STREAM);
  REQUIRE(::listen(full_socket.get(), 0) == 0);
  const auto in_queue = net::connect_to(full, SOCK_STREAM);
  CHECK_THROWS_AS(net::connect_to(full, SOCK_STREAM), CommError);  // no room for more
  for (int i = 0; i < 10; ++i) {
    for (const auto& server : {full, deaf, new_name()}) {
      silent.push_back(std::make_unique<Beating>(server, kHeartbeat, ends));
    }
  }
  const auto link = connected(lively, kHeartbeat);
  wait_for([&] { return ends >= 30 && listener.beats() >= 8; });
  CHECK_FALSE(link->is_broken());
  CHECK(listener.longest_gap() < kHeartbeat);
  silent.clear();
  const int ended = ends;
  std::this_thread::sleep_for(milliseconds(100));
  CHECK(ends == ended);
}

TEST_CASE("links come and go in several threads at once", "[server]") {
  const auto name = new_name();
  const Listener listener(name);
  const auto failures = testing::run_threads(4, [&](int) {
    for (int i = 0; i < 50; ++i) {
      const auto link = connected(name, milliseconds(2'000));
      MUSTER_CHECK(!link->is_broken());
      if (i % 8 == 0) std::this_thread::sleep_for(milliseconds(2));
    }
  });
  CHECK(failures == "");
  CHECK(count_hearts() == 0);
}

TEST_CASE("a forked child neither beats for its parent nor ends its links, and may have links of its own", "[server]") {
  const auto name = new_name();
  const Listener listener(name);
  auto link = connected(name, milliseconds(500));
  wait_for([&] { return listener.beats() >= 2; });
  const auto others = new_name();
  const Listener of_child(others);
  for (int i = 0; i < 20; ++i) {  // the heart may be anywhere
    const pid_t child = ::fork();
    if (child == 0) {
      bool is_well = count_hearts() == 0 && link->is_broken();
      link.reset();
      if (i % 2 == 0) {
        auto own = connected(others, milliseconds(500));
        is_well = is_well && count_hearts() == 1;
        own.reset();
      }
      ::_exit(is_well && count_hearts() == 0 ? 0 : 1);
    }
    int status = -1;
    const auto deadline = in(milliseconds(20'000));
    while (::waitpid(child, &status, WNOHANG) == 0) {
      if (Surroundings::Clock::now() > deadline) ::kill(child, SIGKILL);
      std::this_thread::sleep_for(milliseconds(1));
    }
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
  }
  CHECK_FALSE(link->is_broken());
  const int beats = listener.beats();
  wait_for([&] { return listener.beats() >= beats + 2; });
}

TEST_CASE("a forked child that ends its parent's client does not leave the job for it", "[server]") {
  const Plan plan = testing::small_plan(2, 1, std::vector<kernels::SgdGroup>(2));
  const testing::Servers running(testing::server_names(2));
  auto worker = std::make_unique<testing::Worker>(testing::config_of(running.names, 0, plan));
  worker->join();
  worker->step(1);
  const pid_t child = ::fork();
  if (child == 0) {
    worker->client.leave();
    worker.reset();
    ::_exit(0);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  worker->step(2);
  worker->step(3);
  CHECK(worker->decision.members == std::vector<uint32_t>{0});
}
