#include "bindings/bindings.h"

#include <muster/version.h>

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ core of Muster; private, use the muster package.";
  m.attr("__version__") = muster::version();
  m.attr("built_with_torch") = muster::built_with_torch();
  muster::bind_errors(m);
  muster::bind_core(m);
  muster::bind_embedding(m);
  muster::bind_server(m);
  muster::bind_optimizer(m);
  muster::bind_module_state(m);
  muster::bind_several_hosts(m);
  muster::bind_strategy(m);
  muster::bind_gradients(m);
  muster::bind_optimizer_sets(m);
  muster::bind_loaders(m);
  muster::bind_comm(m);
  muster::bind_checkpoint(m);
  muster::bind_saving(m);
  muster::bind_server_probe(m);
  muster::bind_raw_workers_probe(m);
  muster::bind_kernels(m);
  muster::bind_reduce_steps(m);
  muster::bind_peer_access(m);
}
