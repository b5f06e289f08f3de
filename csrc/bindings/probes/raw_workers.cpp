#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "muster/error.h"
#include "net/channel.h"
#include "server/protocol/protocol.h"

namespace muster {

namespace py = pybind11;

namespace server {
namespace {

constexpr std::chrono::seconds kReplyPatience{120};
constexpr size_t kNumbers = 16;      // of a window's tail
constexpr size_t kRecordBytes = 80;  // of what a window's workers show each other
constexpr int64_t kElements = 1024;  // of the model

/// Workers of a synchronous job that compute and push nothing: one thread speaks for all of them, each over one
/// connection to a server. Shows what agreement among many costs a server.
class RawWorkers {
 public:
  RawWorkers(const std::string& server, uint32_t count) {
    Configure configure;
    configure.job = 1;
    configure.plan.parameters = {{"parameter", {kElements}, {1}, at::kFloat}};
    configure.plan.group_of = {0};
    configure.plan.groups = std::vector<kernels::SgdGroup>{{0.1, 0, 0, 0, false, false}};
    configure.plan.workers = count;
    configure.plan.staleness = 0;
    configure.plan.heartbeat_ms = 60'000;  // nobody gives signs of life between decisions
    for (uint32_t rank = 0; rank < count; ++rank) {
      channels_.push_back(net::connect_on_host(server, nullptr, deadline()));
      Hello hello;
      hello.rank = rank;
      ask<Welcome>(rank, hello);
      const auto known = ask<Configured>(rank, configure);
      if (rank == 0 && !known.started) begin();
    }
    for (uint32_t rank = 0; rank < count; ++rank) ask<Joined>(rank, Join{});
  }

  /// Seconds of one of `repeats` decisions: from the first commit that is sent to the last decision that is read.
  double time_decisions(int repeats) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) decide();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / repeats;
  }

 private:
  // As the chief does, whose values the others' model begins with.
  void begin() {
    const std::vector<float> values(kElements);
    const net::Bytes bytes = std::as_bytes(std::span(values));
    channels_[0]->send(Write::kType, encode(Write{0, Part::parameter}), {&bytes, 1}, deadline());
    receive(0, Done::kType);
    ask<Done>(0, Start{});
  }

  static net::Deadline deadline() { return std::chrono::steady_clock::now() + kReplyPatience; }

  template <class Request>
  void send(uint32_t rank, const Request& request) {
    channels_[rank]->send(Request::kType, encode(request), {}, deadline());
  }

  net::Frame receive(uint32_t rank, uint16_t type) {
    net::Frame frame;
    if (!channels_[rank]->receive(frame, deadline())) throw CommError("the server ended a connection");
    if (frame.type == Refusal::kType) throw CommError("the server refused: " + decode<Refusal>(frame.message).text);
    if (frame.type != type) throw CommError("the server answered with type " + std::to_string(frame.type));
    return frame;
  }

  template <class Answer, class Request>
  Answer ask(uint32_t rank, const Request& request) {
    send(rank, request);
    return decode<Answer>(receive(rank, Answer::kType).message);
  }

  void decide() {
    ++step_;
    Commit commit;
    commit.step = step_;
    commit.numbers.assign(kNumbers, 1.0);
    commit.record.assign(kRecordBytes, 'r');
    for (uint32_t rank = 0; rank < channels_.size(); ++rank) send(rank, commit);
    for (uint32_t rank = 0; rank < channels_.size(); ++rank) receive(rank, Decision::kType);
  }

  std::vector<std::unique_ptr<net::Channel>> channels_;  // by rank
  uint64_t step_ = 0;
};

}  // namespace
}  // namespace server

void bind_raw_workers_probe(py::module_& parent) {
  using server::RawWorkers;
  py::module_ m = parent.attr("_server");
  py::class_<RawWorkers, Owned<RawWorkers>>(m, "RawWorkers")
      .def(py::init([](const std::string& server, uint32_t count) {
             return Owned<RawWorkers>(new RawWorkers(server, count));
           }),
           py::arg("server"), py::arg("count"), Release())
      .def("time_decisions", &RawWorkers::time_decisions, "Seconds of one of `repeats` decisions.", py::arg("repeats"),
           Release());
}

}  // namespace muster
