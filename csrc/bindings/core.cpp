#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <muster/cluster.h>
#include <muster/error.h>
#include <torch/csrc/Generator.h>

#include <thread>

#include "bindings/bindings.h"
#include "core/flat_layout.h"
#include "core/log.h"
#include "core/replica_context.h"

namespace muster {
namespace {

namespace py = pybind11;
using py::literals::operator""_a;

int python_level(LogLevel level) { return 10 * (static_cast<int>(level) + 1); }
LogLevel log_level(int python_level) { return static_cast<LogLevel>(python_level / 10 - 1); }

void log_to_python(LogLevel level, const std::string& message) {
  const ExitGate::Visit visit;
  if (!visit) return;
  const py::gil_scoped_acquire gil;
  const py::error_scope keep_pending_error;
  try {
    py::module_::import("logging").attr("getLogger")("muster").attr("log")(python_level(level), "%s", message);
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) {
      PyErr_SetInterrupt();  // Ctrl-C belongs to the main thread, whoever logs
    } else {
      error.discard_as_unraisable("muster's log");
    }
  }
}

void bind_log(py::module_& m) {
  set_log_sink(log_to_python);
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    const py::gil_scoped_release no_gil;
    set_log_sink({});
    ExitGate::close();
  }));
  m.def("_log", [](int level, const std::string& message) { log(log_level(level), message); }, "level"_a, "message"_a);
  m.def(
      "_log_from_thread",
      [](int level, const std::string& message, int count) {
        std::thread([=] {
          for (int i = 0; i < count; ++i) log(log_level(level), message);
        }).detach();
      },
      "level"_a, "message"_a, "count"_a);
  m.def("_set_log_rank", &set_log_rank, "rank"_a, "num_workers"_a);
}

Cluster make_cluster(int rank, int num_workers, const std::string& address, int local_rank,
                     std::vector<std::string> servers, bool insecure, const std::string& meeting) {
  Cluster cluster;
  cluster.rank = rank;
  cluster.num_workers = num_workers;
  cluster.address = address;
  cluster.local_rank = local_rank;
  cluster.servers = std::move(servers);
  cluster.insecure = insecure;
  cluster.meeting = meeting;
  cluster.launcher = "arguments";
  cluster.validate();
  return cluster;
}

std::string repr(const Cluster& cluster) {
  std::string text = "Cluster(rank=" + std::to_string(cluster.rank) +
                     ", num_workers=" + std::to_string(cluster.num_workers) + ", address='" + cluster.address +
                     "', local_rank=" + std::to_string(cluster.local_rank);
  if (!cluster.servers.empty()) text += ", servers=" + py::repr(py::cast(cluster.servers)).cast<std::string>();
  if (cluster.insecure) text += ", insecure=True";
  if (!cluster.meeting.empty()) text += ", meeting='" + cluster.meeting + "'";
  return text + ")";
}

Cluster cluster_from_environment(const std::map<std::string, std::string>& variables) {
  return Cluster::from_env([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

void bind_cluster(py::module_& m) {
  py::class_<Cluster>(
      m, "Cluster",
      "A worker's place in a job: its rank among num_workers and the address (\"host:port\") where they "
      "meet, which rank 0 hosts; and the addresses of parameter servers.")
      .def(py::init(&make_cluster), "rank"_a, "num_workers"_a, "address"_a, "local_rank"_a = 0,
           "servers"_a = py::tuple(), py::kw_only(), "insecure"_a = false, "meeting"_a = "")
      .def_static(
          "from_env", py::overload_cast<>(&Cluster::from_env),
          "Reads torchrun's, Slurm's or Open MPI's variables, and MUSTER_SERVERS; without a launcher, a world of "
          "one.")
      .def_readonly("rank", &Cluster::rank)
      .def_readonly("num_workers", &Cluster::num_workers)
      .def_readonly("address", &Cluster::address)
      .def_readonly("local_rank", &Cluster::local_rank)
      .def_property_readonly("servers", [](const Cluster& cluster) { return py::tuple(py::cast(cluster.servers)); })
      .def_readonly("insecure", &Cluster::insecure)
      .def_readonly("meeting", &Cluster::meeting)
      .def_readonly("store_is_hosted", &Cluster::store_is_hosted)
      .def_readonly("job", &Cluster::job)
      .def_readonly("launcher", &Cluster::launcher)
      .def("__eq__", [](const Cluster& a,
                        const py::object& b) { return py::isinstance<Cluster>(b) && a == b.cast<const Cluster&>(); })
      .def("__repr__", &repr)
      .attr("__module__") = "muster";
  m.def("_cluster_from_environment", &cluster_from_environment, "variables"_a);
}

std::optional<at::Generator> replica_generator(c10::Device device) {
  const auto replica = current_replica();
  if (!replica) return std::nullopt;
  const auto& generator = device.is_cpu() ? replica->generator : replica->device_generator;
  return generator.defined() && generator.device() == device ? std::optional(generator) : std::nullopt;
}

/// Makes a Python generator stand for the default one of `device`: methods that its class does not override, and
/// operators that it is passed to, act on that.
void adopt_default_generator(const py::object& generator, c10::Device device) {
  if (THPGenerator_Check(generator.ptr()) != 1)
    throw InvalidArgument("adopt_default_generator takes a torch.Generator");
  reinterpret_cast<THPGenerator*>(generator.ptr())->cdata = at::globalContext().defaultGenerator(device);
}

/// A replica's scope as a context manager for tests; each thread enters one of its own.
class Scope {
 public:
  Scope(uint64_t seed, int replica) : context_(std::make_shared<ReplicaContext>()) {
    context_->replica = replica;
    context_->local_replica = replica;
    context_->generator = at::detail::createCPUGenerator(seed);
  }
  void enter() { scope_ = std::make_unique<ReplicaScope>(context_); }
  void exit(const py::args&) { scope_.reset(); }

 private:
  std::shared_ptr<ReplicaContext> context_;
  std::unique_ptr<ReplicaScope> scope_;
};

void bind_random(py::module_& m) {
  m.def("replica_generator", &replica_generator, "device"_a);
  m.def("adopt_default_generator", &adopt_default_generator, "generator"_a, "device"_a);
  m.def("stream_seed", &stream_seed, "seed"_a, "replica"_a, "t"_a);
  m.def("_current_replica", []() -> std::optional<int> {
    const auto replica = current_replica();
    return replica ? std::optional(replica->replica) : std::nullopt;
  });
  py::class_<Scope>(m, "_ReplicaScope")
      .def(py::init<uint64_t, int>(), "seed"_a, "replica"_a = 0)
      .def("__enter__", &Scope::enter)
      .def("__exit__", &Scope::exit);
}

FlatLayout layout_of(const std::vector<std::pair<std::string, at::Tensor>>& parameters, std::vector<int> order,
                     int64_t bucket_bytes, int64_t first_bucket_bytes) {
  std::vector<ParameterSpec> specs;
  for (const auto& [name, tensor] : parameters) {
    specs.push_back({name, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
  }
  return {std::move(specs), std::move(order), bucket_bytes, first_bucket_bytes};
}

void bind_layout(py::module_& m) {
  py::class_<FlatLayout>(m, "_FlatLayout")
      .def(py::init(&layout_of), "parameters"_a, "order"_a, "bucket_bytes"_a, "first_bucket_bytes"_a)
      .def_property_readonly("digest", &FlatLayout::digest)
      .def_property_readonly("order", &FlatLayout::order)
      .def_property_readonly("buckets",
                             [](const FlatLayout& layout) {
                               py::list buckets;
                               for (const BucketSpec& bucket : layout.buckets()) {
                                 buckets.append(py::make_tuple(bucket.dtype, bucket.numel, bucket.parameters));
                               }
                               return buckets;
                             })
      .def_property_readonly("slots",
                             [](const FlatLayout& layout) {
                               py::list slots;
                               for (const Slot& slot : layout.slots()) {
                                 slots.append(py::make_tuple(slot.bucket, slot.offset, slot.numel, slot.strides));
                               }
                               return slots;
                             })
      .def_static("describe_difference", &FlatLayout::describe_difference, "here"_a, "there"_a);
}

}  // namespace

void bind_core(py::module_& m) {
  bind_log(m);
  bind_cluster(m);
  bind_random(m);
  bind_layout(m);
}

}  // namespace muster
