#include <memory>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/callbacks.h"
#include "bindings/interruptible.h"
#include "gradient/arrivals.h"
#include "gradient/gradient_memory.h"
#include "strategy/strategy_core.h"

namespace muster {

namespace py = pybind11;

void bind_gradients(py::module_& m) {
  py::class_<GradientArrivals>(m, "GradientArrivals", "Watches whether gradients come to parameters.")
      .def(py::init([](std::vector<at::Tensor> parameters, const py::object& first) {
             return std::make_unique<GradientArrivals>(std::move(parameters), callback(first));
           }),
           py::arg("parameters"), py::arg("first"))
      .def("renew", &GradientArrivals::renew)
      .def("announce", &GradientArrivals::announce, py::arg("next"))
      .def("take", &GradientArrivals::take);
  py::class_<GradientMemory, std::shared_ptr<GradientMemory>>(m, "GradientMemory", "Where gradients had best come.")
      .def("open", &GradientMemory::open)
      .def_static("close", &GradientMemory::close);
  using Core = py::class_<StrategyCore, std::shared_ptr<StrategyCore>>;
  py::reinterpret_borrow<Core>(m.attr("StrategyCore"))
      .def(
          "average_gradients", [](StrategyCore& c, int module) { c.gradient_average().average_module(module); },
          py::call_guard<Interruptible>())
      .def(
          "average_gradients_of",
          [](StrategyCore& c, const std::vector<at::Tensor>& parameters) { c.gradient_average().average(parameters); },
          py::arg("parameters"), py::call_guard<Interruptible>())
      .def(
          "add_no_gradients_of",
          [](StrategyCore& c, const std::vector<at::Tensor>& parameters) {
            c.gradient_average().add_nothing(parameters);
          },
          py::arg("parameters"), py::call_guard<Interruptible>())
      .def(
          "gradient_memory",
          [](StrategyCore& c, const std::vector<at::Tensor>& parameters) {
            return c.gradient_average().memory_for(parameters);
          },
          py::arg("parameters"));
}

}  // namespace muster
