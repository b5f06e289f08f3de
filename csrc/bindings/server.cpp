#include "server/shard/server.h"

#include <pybind11/stl.h>

#include <optional>

#include "bindings/bindings.h"
#include "muster/parameter_server.h"
#include "server/protocol/address.h"

namespace muster {

namespace py = pybind11;

void bind_server(py::module_& parent) {
  py::class_<ServerOptions>(parent, "ServerOptions")
      .def(
          py::init([](std::optional<int> staleness, std::optional<int64_t> log_bytes, double patience, double heartbeat,
                      bool takeover) { return ServerOptions{staleness, log_bytes, patience, heartbeat, takeover}; }),
          py::kw_only(), py::arg("staleness"), py::arg("log_bytes"), py::arg("patience"), py::arg("heartbeat"),
          py::arg("takeover"));
  py::module_ m = parent.def_submodule("_server", "Parameter servers.");
  m.def("channel_name", &server::channel_name, py::arg("address"));
  m.def("free_address", &server::free_address);
  py::class_<server::ParameterServer, Owned<server::ParameterServer>>(m, "ParameterServer")
      .def(py::init([](std::string name, std::string snapshots, double snapshot_every) {
             server::ServerConfig config;
             config.name = std::move(name);
             config.snapshots = std::move(snapshots);
             config.snapshot_every = to_ms(snapshot_every);
             return Owned<server::ParameterServer>(new server::ParameterServer(std::move(config)));
           }),
           py::arg("name"), py::arg("snapshots") = "", py::arg("snapshot_every") = 30.0, Release())
      .def("is_deserted", &server::ParameterServer::is_deserted, Release())
      .def("snapshot", &server::ParameterServer::snapshot, Release());
}

}  // namespace muster
