#include "bindings/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <array>

#include "comm/c10d/communicator.h"
#include "comm/nccl/nccl.h"
#include "comm/shared/host_mesh.h"
#include "job/nccl_groups.h"
#include "muster/cluster.h"
#include "net/rendezvous.h"

namespace muster {
namespace {

namespace py = pybind11;
using comm::Communicator;

ReduceOp parse_op(const std::string& name) {
  if (name == "sum") return ReduceOp::sum;
  if (name == "min") return ReduceOp::min;
  if (name == "max") return ReduceOp::max;
  throw InvalidArgument("op '" + name + "' is not one of sum, min, max");
}

at::ScalarType scalar_type(const py::object& dtype) { return py::cast<at::ScalarType>(dtype); }

void bind_communicator(py::module_& m) {
  py::class_<comm::Work>(m, "Work")
      .def("done", &comm::Work::done, Release())
      .def(
          "wait", [](comm::Work& work, double timeout) { work.wait(to_ms(timeout)); }, py::arg("timeout") = -0.001,
          Release())
      .def("outputs", [](comm::Work& work) {
        py::list outputs;
        for (const at::Tensor& tensor : work.outputs())
          outputs.append(tensor.defined() ? py::cast(tensor) : py::none());
        return outputs;
      });

  py::class_<Communicator, comm::CommunicatorPtr>(m, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def("allocate",
           [](Communicator& c, int64_t numel, const py::object& dtype) {
             const at::ScalarType type = scalar_type(dtype);
             const WithoutGil without_gil;
             return c.allocate(numel, type);
           })
      .def(
          "all_reduce",
          [](Communicator& c, const at::Tensor& tensor, const std::string& op, uint64_t tag, bool receive,
             const std::vector<std::array<int64_t, 3>>& runs) {
            if (runs.empty()) return c.all_reduce(tensor, parse_op(op), tag, {receive});
            std::vector<comm::OwnedRun> owned;
            for (const auto& [rank, begin, count] : runs) owned.push_back({static_cast<int>(rank), begin, count});
            return c.all_reduce(tensor, parse_op(op), tag, comm::Receivers::owners(std::move(owned), c.rank()));
          },
          py::arg("tensor"), py::arg("op") = "sum", py::arg("tag") = 0, py::arg("receive") = true,
          py::arg("runs") = std::vector<std::array<int64_t, 3>>(), Release())
      .def("broadcast", &Communicator::broadcast, py::arg("tensor"), py::arg("source"), Release())
      .def(
          "all_gather", [](Communicator& c, const at::Tensor& input) { return c.all_gather(input); }, py::arg("input"),
          Release())
      .def(
          "reduce_scatter",
          [](Communicator& c, const at::Tensor& output, const at::Tensor& input, const std::string& op) {
            return c.reduce_scatter(output, input, parse_op(op));
          },
          py::arg("output"), py::arg("input"), py::arg("op") = "sum", Release())
      .def("barrier", &Communicator::barrier, Release())
      .def(
          "begin_scope", [](Communicator& c, uint64_t scope) { c.begin_scope(scope); }, py::arg("scope"), Release())
      .def(
          "end_scope",
          [](Communicator& c, const std::string& end, const std::string& reason) {
            const auto how = end == "finished" ? comm::ScopeEnd::finished
                             : end == "failed" ? comm::ScopeEnd::failed
                                               : comm::ScopeEnd::absent;
            c.end_scope(how, reason).wait();
          },
          py::arg("end"), py::arg("reason") = "", Release())
      .def("abort", &Communicator::abort, py::arg("reason"), Release());
}

}  // namespace

void bind_comm(py::module_& parent) {
  py::module_ m = parent.def_submodule("_comm", "Communicators, for tests and benchmarks.");
  bind_communicator(m);
  m.def(
      "time_all_reduce",
      [](Communicator& c, const at::Tensor& tensor, int64_t repeats) {
        const auto start = std::chrono::steady_clock::now();
        for (int64_t i = 0; i < repeats; ++i) c.all_reduce(tensor, ReduceOp::sum).wait();
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
               static_cast<double>(repeats);
      },
      "Seconds of one of `repeats` sums, each waited for.", Release());
  m.def("make_single", [] { return comm::make_single(); });
  m.def(
      "make_local", [](int size, double timeout) { return comm::make_local(size, to_ms(timeout)); }, py::arg("size"),
      py::arg("timeout") = 600.0);

  py::class_<comm::HostMesh, std::shared_ptr<comm::HostMesh>>(m, "HostMesh")
      .def(py::init([](const Cluster& cluster, int replicas, double timeout) {
             const net::StorePtr store = net::open_store(cluster, to_ms(timeout));
             comm::HostMesh::Options options;
             options.rank = cluster.rank;
             options.num_workers = cluster.num_workers;
             options.replicas = replicas;
             options.timeout = to_ms(timeout);
             return comm::HostMesh::connect(*store, options);
           }),
           py::arg("cluster"), py::arg("replicas") = 1, py::arg("timeout") = 600.0, Release())
      .def("make_group", &comm::HostMesh::make_group, py::arg("name"), Release());

  const auto options_of = [](bool check, double timeout) {
    comm::C10dOptions options;
    options.check = check;
    options.timeout = to_ms(timeout);
    return options;
  };
  m.def(
      "make_c10d",
      [options_of](comm::ProcessGroupPtr group, bool check, double timeout) {
        return comm::make_c10d(std::move(group), options_of(check, timeout));
      },
      py::arg("group"), py::arg("check") = false, py::arg("timeout") = 600.0, Release());
  m.def(
      "make_hierarchical",
      [options_of](comm::ProcessGroupPtr group, int replicas, bool check, double timeout) {
        return comm::make_hierarchical(std::move(group), replicas, options_of(check, timeout));
      },
      py::arg("group"), py::arg("replicas"), py::arg("check") = false, py::arg("timeout") = 600.0, Release());
  m.def(
      "make_nccl",
      [](const net::StorePtr& store, int rank, int size, c10::Device device, double timeout, size_t arena_bytes,
         bool blocking) {
        comm::NcclOptions options;
        options.timeout = to_ms(timeout);
        options.arena_bytes = arena_bytes;
        options.blocking = blocking;
        return comm::make_nccl(*store, rank, size, device, options);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("device"), py::arg("timeout") = 600.0,
      py::arg("arena_bytes") = 0, py::arg("blocking") = comm::NcclOptions().blocking, Release());
  m.def("set_nccl_alone", [](bool is_wanted) { uses_nccl_alone() = is_wanted; }, py::arg("is_wanted"));
}

}  // namespace muster
