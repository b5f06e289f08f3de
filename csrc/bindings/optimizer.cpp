#include "bindings/optimizer.h"

#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "muster/error.h"
#include "optimizer/gradient_norm.h"
#include "strategy/divided_tensors.h"

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

// Thousands of tensors are looked at before every step: items in their order, without a hash of any.
class DictWatch {
 public:
  void note(const py::dict& state) {
    auto& items = noted_.emplace();
    for (const auto& [key, value] : state) items.push_back({{own(key), own(value)}, items_of(value)});
  }

  bool sees(const py::object& state) const {
    return noted_ && PyDict_Check(state.ptr()) && same(state.ptr(), *noted_, [](const Item& item, PyObject* value) {
             return !PyDict_Check(value) || same(value, item.inner, [](const Pair&, PyObject*) { return true; });
           });
  }

 private:
  struct Pair {
    py::object key;
    py::object value;
  };
  struct Item : Pair {
    std::vector<Pair> inner;
  };

  static py::object own(py::handle object) { return py::reinterpret_borrow<py::object>(object); }

  static std::vector<Pair> items_of(py::handle value) {
    std::vector<Pair> items;
    if (!PyDict_Check(value.ptr())) return items;
    for (const auto& [key, held] : py::reinterpret_borrow<py::dict>(value)) items.push_back({own(key), own(held)});
    return items;
  }

  template <class T, class F>
  static bool same(PyObject* dict, const std::vector<T>& noted, const F& same_within) {
    if (static_cast<size_t>(PyDict_Size(dict)) != noted.size()) return false;
    Py_ssize_t position = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (const auto& item : noted) {
      if (PyDict_Next(dict, &position, &key, &value) == 0) return false;
      if (key != item.key.ptr() || value != item.value.ptr() || !same_within(item, value)) return false;
    }
    return true;
  }

  std::optional<std::vector<Item>> noted_;
};

}  // namespace

void bind_optimizer(py::module_& m) {
  py::class_<DictWatch>(m, "DictWatch",
                        "A dict of dicts, and whether it is the one that was noted, by identity and in its order.")
      .def(py::init<>())
      .def("note", &DictWatch::note)
      .def("sees", &DictWatch::sees);
  m.def("current_master", &current_master);
  m.def(
      "make_flat",
      [](const std::string& algorithm, const std::vector<std::pair<at::Tensor, uint32_t>>& parameters,
         const std::vector<std::vector<double>>& groups) {
        std::vector<FlatParameter> flat;
        for (const auto& [tensor, group] : parameters) flat.push_back({std::to_string(flat.size()), tensor, group});
        return FlatOptimizer(std::move(flat), flat_groups(algorithm, groups));
      },
      "A flat optimizer of no strategy, over (parameter, group).");
  py::class_<FlatOptimizer>(m, "FlatOptimizer")
      .def_property_readonly("state_names",
                             [](const FlatOptimizer& flat) {
                               std::vector<std::string> names(flat.state().names().begin(), flat.state().names().end());
                               return names;
                             })
      .def_property_readonly("is_sharded", [](const FlatOptimizer& flat) { return flat.shard().size > 1; })
      .def("state", [](const FlatOptimizer& flat, size_t parameter,
                       size_t which) { return defined(flat.state().tensor(parameter, which)); })
      .def("step_count", [](const FlatOptimizer& flat, size_t p) { return flat.state().entry(p).step; })
      .def("master", [](const FlatOptimizer& flat, size_t p) { return defined(flat.state().entry(p).master); })
      .def("own_run", [](const FlatOptimizer& flat, size_t p, size_t which) { return own_run(flat.state(), p, which); })
      .def("has_started", [](const FlatOptimizer& flat, size_t p) { return flat.state().entry(p).started; })
      .def("num_states", [](const FlatOptimizer& flat, size_t p) { return flat.state().entry(p).num_states; })
      .def("set_state", [](FlatOptimizer& flat, size_t p, size_t which,
                           const at::Tensor& whole) { flat.state().set(p, which, whole); })
      .def("set_step_count", [](FlatOptimizer& flat, size_t p, double count) { flat.state().set_step_count(p, count); })
      .def("set_master",
           [](FlatOptimizer& flat, size_t parameter, const std::optional<at::Tensor>& whole) {
             flat.state().set_master(parameter, whole.value_or(at::Tensor()));
           })
      .def("reset", [](FlatOptimizer& flat, size_t p) { flat.state().reset(p); })
      .def("take_started", [](FlatOptimizer& flat) { return flat.state().take_started(); })
      .def(
          "step_from_sums",
          [](FlatOptimizer& flat, const std::vector<at::Tensor>& sums, double divisor, double clip_norm,
             const std::string& algorithm, const std::vector<std::vector<double>>& groups) {
            double tail[kernels::kTailFields] = {};
            tail[kernels::kWeight] = divisor;
            tail[kernels::kContributions] = 1;
            kernels::StepScalars scalars{};
            scalars.unit = 1;
            kernels::WindowOptions options{};
            options.clip_norm = clip_norm;
            options.loss_scale = 1;
            take_norm(sums, tail, options, scalars);
            std::vector<FlatGradient> gradients;
            for (const auto& sum : sums) gradients.push_back({sum, {}});
            flat.step(gradients, flat_groups(algorithm, groups), &scalars, /*keep=*/false);
            return scalars.norm;
          },
          Release(),
          "What a strategy does after the reduction, from means times `divisor`; for benchmarks. Returns the norm.")
      .def(
          "step_from_grad",
          [](FlatOptimizer& flat, const std::string& algorithm, const std::vector<std::vector<double>>& groups) {
            flat.step_from_grad(flat_groups(algorithm, groups));
          },
          Release());
}

}  // namespace muster
