#include <utility>

#include "bindings/bindings.h"
#include "bindings/callbacks.h"
#include "gradient/arrivals.h"

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
}

}  // namespace muster
