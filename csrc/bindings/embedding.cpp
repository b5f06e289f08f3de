#include <muster/error.h>
#include <muster/partitioner.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/embedding.h"
#include "bindings/interruptible.h"
#include "embedding/row_source.h"
#include "strategy/registration.h"
#include "strategy/strategy_core.h"

namespace muster {
namespace {

namespace py = pybind11;
using py::literals::operator""_a;

constexpr const char* kCall = "The number of rows of each shard of a tensor of this shape and dtype.";

template <class Partitioner>
std::vector<int64_t> call(const Partitioner& partitioner, const std::vector<int64_t>& shape, at::ScalarType dtype) {
  return partitioner(shape, dtype);
}

void fill_rows(const at::Tensor& values, const std::string& kind, double scale, uint64_t seed, int64_t first) {
  if (values.dim() != 2 || values.scalar_type() != at::kFloat || !values.is_cpu() || !values.is_contiguous()) {
    throw InvalidArgument("rows are filled in a contiguous float32 matrix on the CPU");
  }
  row_initialiser(kind, scale, seed).fill_rows(values, first);
}

std::optional<std::pair<at::Tensor, at::Tensor>> pull(const at::Tensor& weight, const at::Tensor& ids) {
  auto pulled = pull_rows(weight, ids);
  if (!pulled) return std::nullopt;
  return std::pair(std::move(pulled->rows), std::move(pulled->ids));
}

}  // namespace

RowInitialiser row_initialiser(const std::string& kind, double scale, uint64_t seed) {
  return {kind == "normal" ? RowInitialiser::Kind::normal : RowInitialiser::Kind::uniform, scale, seed};
}

void bind_embedding(py::module_& m) {
  m.def("fill_rows", &fill_rows, "values"_a, "kind"_a, "scale"_a, "seed"_a, "first"_a = 0, Release());
  m.def("make_row_stub", &make_row_stub, "num_rows"_a, "dim"_a);
  m.def("is_row_stub", &is_row_stub, "weight"_a);
  m.def("pull_rows", &pull, "weight"_a, "ids"_a, py::call_guard<Interruptible>());
  m.def(
      "table_contents",
      [](StrategyCore& core, int parameter) {
        const auto pass = core.session().enter();
        auto found = core.sets().table_contents(parameter);
        const auto seed = core.session().registry().rows_of(static_cast<size_t>(parameter))->initialiser.seed;
        return std::tuple(std::move(found.rows), std::move(found.values), std::move(found.states), found.steps, seed);
      },
      "core"_a, "parameter"_a, py::call_guard<Interruptible>());
  m.def(
      "begin_with",
      [](StrategyCore& core, int parameter, const std::string& kind, double scale, uint64_t seed,
         const at::Tensor& rows, const at::Tensor& values, const at::Tensor& states, uint64_t steps) {
        begin_with(core.session(), parameter, row_initialiser(kind, scale, seed), {rows, values, states, steps});
      },
      "core"_a, "parameter"_a, "kind"_a, "scale"_a, "seed"_a, "rows"_a, "values"_a, "states"_a, "steps"_a, Release());
  m.def("whole_rows", &whole_rows, "weight"_a, py::call_guard<Interruptible>());
  py::class_<FixedShards>(m, "FixedShards",
                          "So many shards, or one a row where there are fewer rows. Their sizes differ by at most one, "
                          "and the first take the extra row: 10 rows in 4 shards are 3, 3, 2, 2.")
      .def(py::init<int64_t>(), "num_shards"_a)
      .def("__call__", &call<FixedShards>, "shape"_a, "dtype"_a, kCall)
      .attr("__module__") = "muster";
  py::class_<MinSize>(m, "MinSize",
                      "As many shards as the tensor's bytes over min_shard_bytes, rounded up as in TensorFlow; at most "
                      "max_shards.")
      .def(py::init<int64_t, int64_t>(), "min_shard_bytes"_a = 256 << 10, "max_shards"_a = 1)
      .def("__call__", &call<MinSize>, "shape"_a, "dtype"_a, kCall)
      .attr("__module__") = "muster";
  py::class_<MaxSize>(m, "MaxSize",
                      "As few shards of at most max_shard_bytes as will do; larger ones where there would be more than "
                      "max_shards, or where one row is larger.")
      .def(py::init<int64_t, std::optional<int64_t>>(), "max_shard_bytes"_a, "max_shards"_a = py::none())
      .def("__call__", &call<MaxSize>, "shape"_a, "dtype"_a, kCall)
      .attr("__module__") = "muster";
}

}  // namespace muster
