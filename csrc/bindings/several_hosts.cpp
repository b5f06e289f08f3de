#include "bindings/bindings.h"
#include "bindings/interruptible.h"
#include "job/make_groups.h"
#include "net/unix_socket.h"

namespace muster {

namespace py = pybind11;

void bind_several_hosts(py::module_& m) {
  py::class_<SeveralHosts>(m, "SeveralHosts")
      .def(py::init([](std::vector<std::string> hosts, const comm::ProcessGroupPtr& workers,
                       const comm::ProcessGroupPtr& workers_results, const comm::ProcessGroupPtr& step,
                       const comm::ProcessGroupPtr& gradients, const comm::ProcessGroupPtr& results,
                       const net::StorePtr& store) {
             return SeveralHosts{.hosts = std::move(hosts),
                                 .workers = workers,
                                 .workers_results = workers_results,
                                 .step = step,
                                 .gradients = gradients,
                                 .results = results,
                                 .store = store};
           }),
           py::arg("hosts"), py::kw_only(), py::arg("workers"), py::arg("workers_results"), py::arg("step"),
           py::arg("gradients"), py::arg("results"), py::arg("store") = net::StorePtr());
  m.def("host_identity", net::host_identity);
  m.def("tell_workers", [](const Cluster& cluster, const std::string& text, double timeout) {
    const Interruptible interruptible;
    return tell_workers(cluster, text, comm::Milliseconds(static_cast<int64_t>(1e3 * timeout)));
  });
}

}  // namespace muster
