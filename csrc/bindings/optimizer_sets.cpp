#include "strategy/optimizer_sets.h"

#include <tuple>

#include "bindings/bindings.h"

namespace muster {

namespace py = pybind11;

void bind_optimizer_sets(py::module_& m) {
  py::class_<OptimizerSets>(m, "OptimizerSets", "Which optimizers of a strategy step together, by position.")
      .def(py::init<std::shared_ptr<StrategyCore>>())
      .def(
          "set_of",
          [](OptimizerSets& sets, std::vector<int> optimizers, std::vector<uint64_t> look, const py::object& resolve) {
            return sets.set_of({.optimizers = std::move(optimizers), .look = std::move(look)}, [&] {
              std::vector<OptimizerSets::Member> members;
              for (auto& [parameters, is_flat] : py::cast<std::vector<std::tuple<std::vector<int>, bool>>>(resolve())) {
                members.push_back({std::move(parameters), is_flat});
              }
              return members;
            });
          },
          "`resolve` gives (registry indices of its parameters, whether it is flat) for each optimizer.")
      .def("numbers", &OptimizerSets::numbers)
      .def("optimizers_of", &OptimizerSets::optimizers_of)
      .def("is_fused", &OptimizerSets::is_fused);
}

}  // namespace muster
