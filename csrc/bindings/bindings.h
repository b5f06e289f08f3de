// One function a room; module.cpp calls each. Binding files include this header alone of pybind11's and torch's
// Python side, so that the precompiled header serves them all.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>

#include "bindings/exit_gate.h"

namespace muster {

/// Deletes an object whose destructor ends threads, which may log: that takes the GIL.
struct DeleteWithoutGil {
  template <class T>
  void operator()(T* object) const {
    const WithoutGil without_gil;
    delete object;
  }
};
template <class T>
using Owned = std::unique_ptr<T, DeleteWithoutGil>;

/// At most 31 years, which clocks can add to now.
inline std::chrono::milliseconds to_ms(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(std::min(seconds, 1e9) * 1000));
}

/// Translates, for the functions of this module, each muster::Error into the class of the same name in muster.errors
/// with its attributes, and each c10::Error into the built-in that torch raises for it; an exception that was raised in
/// Python keeps its object and traceback on its way through C++.
void bind_errors(pybind11::module_& m);

/// Cluster, the log's way to logging.getLogger("muster") and the current replica's generator; under names with an
/// underscore, what tests need of them.
void bind_core(pybind11::module_& m);

/// Partitioners, and rows of embeddings.
void bind_embedding(pybind11::module_& m);

/// Parameter servers, in the submodule _server.
void bind_server(pybind11::module_& m);

/// FlatOptimizer, which the Python flat optimizers are thin layers over.
void bind_optimizer(pybind11::module_& m);

/// What user code changed of the attributes of prepared modules.
void bind_module_state(pybind11::module_& m);

/// What workers tell one another before there are groups, and those between hosts.
void bind_several_hosts(pybind11::module_& m);

/// StrategyCore, which the Python strategies are thin layers over.
void bind_strategy(pybind11::module_& m);

/// What loops that call backward by themselves need, after the class of the core that averages for them.
void bind_gradients(pybind11::module_& m);

/// OptimizerSets, after the class of the core whose sets they are.
void bind_optimizer_sets(pybind11::module_& m);

/// Loaders and the passes over them, of a StrategyCore.
void bind_loaders(pybind11::module_& m);

/// Communicators, in the submodule _comm.
void bind_comm(pybind11::module_& m);

/// Snapshots, in the submodule _checkpoint.
void bind_checkpoint(pybind11::module_& m);

/// What strategies keep of themselves.
void bind_saving(pybind11::module_& m);

// --- probes/: what only tests and benchmarks use ---

/// A worker of one parameter, in the submodule _server that bind_server has made.
void bind_server_probe(pybind11::module_& m);
void bind_raw_workers_probe(pybind11::module_& m);

/// Kernels over tensors, in the submodule kernels.
void bind_kernels(pybind11::module_& m);
/// Those that reduce and step in one launch, in the submodule that bind_kernels has made.
void bind_reduce_steps(pybind11::module_& m);
/// Memory of several devices, there too.
void bind_peer_access(pybind11::module_& m);

}  // namespace muster
