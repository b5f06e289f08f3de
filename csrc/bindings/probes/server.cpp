#include <pybind11/stl.h>

#include <chrono>

#include "bindings/bindings.h"
#include "server/shard/server.h"
#include "server/worker/client.h"

namespace muster {
namespace {

namespace py = pybind11;
using py::literals::operator""_a;
using server::Part;
using server::ServerClient;

/// A worker of one fp32 parameter that descends plainly, as benchmarks drive one.
class Probe {
 public:
  Probe(server::ClientConfig config, int64_t numel) : config_(complete(std::move(config), numel)), client_(config_) {
    for (uint32_t c = 0; c < client_.chunks().size(); ++c) {
      const uint64_t bytes = client_.part_bytes(c, Part::parameter);
      gradients_.push_back(std::make_shared<std::vector<std::byte>>(bytes));
      landing_.push_back(client_.allocate(bytes));
    }
    if (config_.rank == 0 && !client_.is_started()) {
      client_.start([&] {
        for (uint32_t c = 0; c < gradients_.size(); ++c) client_.write(c, Part::parameter, *gradients_[c]);
      });
    }
    step_ = client_.join();
  }

  /// A push of all, a step, and a read of all.
  void step() { make(/*computes=*/true); }

  double time_steps(int repeats) {
    return timed(repeats, [&] { step(); });
  }
  /// Of steps that are dropped, so that nothing is computed but what a synchronous job sums.
  double time_exchanges(int repeats) {
    return timed(repeats, [&] { make(/*computes=*/false); });
  }
  double time_reads(int repeats) {
    return timed(repeats, [&] { client_.read(Part::parameter, 0, landing_); });
  }
  uint64_t steps() const noexcept { return step_; }
  void leave() { client_.leave(); }

 private:
  void make(bool computes) {
    ++step_;
    for (uint32_t c = 0; c < client_.chunks().size(); ++c) {
      const server::Bytes bytes(*gradients_[c]);
      client_.push(step_, c, {&bytes, 1}, gradients_[c]);
    }
    client_.flush();
    server::Apply command;
    command.step = step_;
    command.members = {config_.rank};
    command.groups = config_.plan.groups;
    command.scalars.dropped = computes ? 0 : 1;
    if (config_.plan.is_synchronous()) {
      command.members = client_.commit(step_, {1}).members;
      client_.sum(step_, command.members);
      client_.apply_and_read(command, landing_);
    } else {
      client_.apply(command);
      client_.commit(step_, {});
      client_.read(Part::parameter, 0, landing_);
    }
  }

  static server::ClientConfig complete(server::ClientConfig config, int64_t numel) {
    config.plan.parameters = {{"parameter", {numel}, {1}, at::kFloat}};
    config.plan.group_of = {0};
    config.plan.groups = std::vector<kernels::SgdGroup>{{0.1, 0, 0, 0, false, false}};
    config.plan.servers = static_cast<uint32_t>(config.servers.size());
    config.log_bytes = 0;
    return config;
  }

  template <class F>
  static double timed(int repeats, const F& run) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) run();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / repeats;
  }

  const server::ClientConfig config_;
  ServerClient client_;
  std::vector<std::shared_ptr<std::vector<std::byte>>> gradients_;  // by chunk
  std::vector<std::byte*> landing_;
  uint64_t step_ = 0;
};

}  // namespace

void bind_server_probe(py::module_& parent) {
  py::module_ m = parent.attr("_server");
  m.def(
      "stats",
      [](const server::ParameterServer& running) {
        const auto stats = running.stats();
        return py::dict("requests"_a = stats.requests, "pushes"_a = stats.pushes, "connections"_a = stats.connections);
      },
      "What a server has had so far: requests, pushes that it held, and connections that are open.", py::arg("server"));
  py::class_<Probe, Owned<Probe>>(m, "Probe")
      .def(py::init([](std::vector<std::string> servers, int64_t numel, uint32_t rank, uint32_t workers,
                       std::optional<uint32_t> staleness, bool shares_memory, uint32_t lanes, uint64_t chunk_bytes,
                       double patience) {
             server::ClientConfig config;
             config.servers = std::move(servers);
             config.rank = rank;
             config.plan.workers = workers;
             config.plan.staleness = staleness.value_or(server::kAnyStaleness);
             config.plan.chunk_bytes = chunk_bytes;
             config.shares_memory = shares_memory;
             config.lanes = lanes;
             config.patience = to_ms(patience);
             return Owned<Probe>(new Probe(std::move(config), numel));
           }),
           py::arg("servers"), py::arg("numel"), py::arg("rank") = 0, py::arg("workers") = 1,
           py::arg("staleness") = py::none(), py::arg("shares_memory") = true, py::arg("lanes") = 2,
           py::arg("chunk_bytes") = uint64_t{1} << 20, py::arg("patience") = 5.0, Release())
      .def("step", &Probe::step, Release())
      .def("time_steps", &Probe::time_steps, "Seconds of one of `repeats` steps.", py::arg("repeats"), Release())
      .def("time_exchanges", &Probe::time_exchanges,
           "Seconds of one of `repeats` pushes and reads of all without a step.", py::arg("repeats"), Release())
      .def("time_reads", &Probe::time_reads, "Seconds of one of `repeats` reads of all.", py::arg("repeats"), Release())
      .def_property_readonly("steps", &Probe::steps, "That were made, those of earlier lives included.")
      .def("leave", &Probe::leave, Release());
}

}  // namespace muster
