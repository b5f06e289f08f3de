#include "strategy/optimizer_sets.h"

#include <tuple>

#include "bindings/bindings.h"

namespace muster {

namespace py = pybind11;

namespace {

// Which objects stand in which group: looked at in every step, and so by their addresses.
std::vector<uint64_t> look_of(const py::list& groups) {
  std::vector<uint64_t> look;
  for (const py::handle group : groups) {
    for (const py::handle parameter : group) look.push_back(reinterpret_cast<uintptr_t>(parameter.ptr()));
    look.push_back(0);
  }
  return look;
}

}  // namespace

void bind_optimizer_sets(py::module_& m) {
  py::class_<OptimizerSets>(m, "OptimizerSets", "Which optimizers of a strategy step together, by position.")
      .def(py::init<std::shared_ptr<StrategyCore>>())
      .def(
          "set_of",
          [](OptimizerSets& sets, std::vector<int> optimizers, const py::list& groups, const py::object& resolve,
             bool may_share) {
            const auto members_of = [&] {
              std::vector<OptimizerSets::Member> members;
              for (auto& [parameters, is_flat] : py::cast<std::vector<std::tuple<std::vector<int>, bool>>>(resolve())) {
                members.push_back({std::move(parameters), is_flat});
              }
              return members;
            };
            return sets.set_of({.optimizers = std::move(optimizers), .look = look_of(groups)}, members_of, may_share);
          },
          "`groups`: the parameters of each group of all optimizers.\n"
          "`resolve` gives (registry indices of its parameters, whether it is flat) for each optimizer.")
      .def("numbers", &OptimizerSets::numbers)
      .def("optimizers_of", &OptimizerSets::optimizers_of)
      .def("is_fused", &OptimizerSets::is_fused);
}

}  // namespace muster
