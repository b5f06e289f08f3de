#include "bindings/optimizer.h"

#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "muster/error.h"
#include "optimizer/gradient_norm.h"

namespace muster {

namespace py = pybind11;

FlatGroups flat_groups(const std::string& algorithm, const std::vector<std::vector<double>>& rows) {
  const auto check = [&](const std::vector<double>& row, size_t size) {
    if (row.size() != size) throw InvalidArgument(algorithm + " needs " + std::to_string(size) + " hyperparameters");
  };
  if (algorithm == "adam") {
    std::vector<kernels::AdamGroup> groups;
    for (const auto& r : rows) {
      check(r, 8);
      groups.push_back({r[0], r[1], r[2], r[3], r[4], r[5] != 0, r[6] != 0, r[7] != 0});
    }
    return groups;
  }
  if (algorithm == "sgd") {
    std::vector<kernels::SgdGroup> groups;
    for (const auto& r : rows) {
      check(r, 6);
      groups.push_back({r[0], r[1], r[2], r[3], r[4] != 0, r[5] != 0});
    }
    return groups;
  }
  std::vector<kernels::AdagradGroup> groups;
  for (const auto& r : rows) {
    check(r, 5);
    groups.push_back({r[0], r[1], r[2], r[3], r[4] != 0});
  }
  return groups;
}

namespace {

std::optional<at::Tensor> defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace

void bind_optimizer(py::module_& m) {
  py::class_<FlatOptimizer>(m, "FlatOptimizer")
      .def_property_readonly("state_names",
                             [](const FlatOptimizer& flat) {
                               std::vector<std::string> names(flat.state_names().begin(), flat.state_names().end());
                               return names;
                             })
      .def_property_readonly("is_sharded", [](const FlatOptimizer& flat) { return flat.shard().size > 1; })
      .def("state", [](const FlatOptimizer& flat, size_t parameter,
                       size_t which) { return defined(flat.state(parameter, which)); })
      .def("step_count", &FlatOptimizer::step_count)
      .def("master", [](const FlatOptimizer& flat, size_t p) { return defined(flat.master(p)); })
      .def("set_state", &FlatOptimizer::set_state)
      .def("set_step_count", &FlatOptimizer::set_step_count)
      .def("set_master", &FlatOptimizer::set_master)
      .def("take_started", &FlatOptimizer::take_started)
      .def(
          "step_from_sums",
          [](FlatOptimizer& flat, const std::vector<at::Tensor>& sums, double divisor, double clip_norm,
             const std::string& algorithm, const std::vector<std::vector<double>>& groups) {
            double tail[kernels::kTailFields] = {};
            tail[kernels::kWeight] = divisor;
            tail[kernels::kContributions] = 1;
            kernels::StepScalars scalars{};
            scalars.unit = 1;
            take_norm(sums, tail, clip_norm, /*loss_scale=*/1, scalars);
            std::vector<FlatGradient> gradients;
            for (const auto& sum : sums) gradients.push_back({sum, {}});
            flat.step(gradients, flat_groups(algorithm, groups), &scalars, /*keep=*/false);
            return scalars.norm;
          },
          py::call_guard<py::gil_scoped_release>(),
          "What a strategy does after the reduction, from means times `divisor`; for benchmarks. Returns the norm.")
      .def(
          "step_from_grad",
          [](FlatOptimizer& flat, const std::string& algorithm, const std::vector<std::vector<double>>& groups) {
            flat.step_from_grad(flat_groups(algorithm, groups));
          },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace muster
