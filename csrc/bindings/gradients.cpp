#include <memory>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/callbacks.h"
#include "gradient/arrivals.h"
#include "gradient/gradient_memory.h"

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
}

}  // namespace muster
