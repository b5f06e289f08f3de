#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/interruptible.h"
#include "checkpoint/sha256.h"
#include "checkpoint/snapshot_writer.h"
#include "muster/error.h"
#include "net/job_secret.h"
#include "strategy/cut_writing.h"
#include "strategy/saving_schedule.h"
#include "strategy/strategy_core.h"

namespace muster {

namespace py = pybind11;
using py::literals::operator""_a;
using Release = py::call_guard<py::gil_scoped_release>;

void bind_saving(py::module_& m) {
  using checkpoint::SnapshotWriter;
  py::class_<SnapshotWriter>(m, "SnapshotWriter")
      .def(py::init([](std::filesystem::path folder, std::optional<int> keep) {
             return std::make_unique<SnapshotWriter>(std::move(folder), checkpoint::SnapshotOptions{.keep = keep});
           }),
           "folder"_a, "keep"_a)
      .def(
          "write_copy",
          [](SnapshotWriter& writer, checkpoint::NamedTensors tensors, checkpoint::Metadata metadata) {
            writer.write_copy({std::move(tensors), std::move(metadata)});
          },
          "tensors"_a, "metadata"_a, Release())
      .def_property_readonly("is_done", &SnapshotWriter::done)
      .def_property_readonly("written", &SnapshotWriter::written)
      .def("wait", &SnapshotWriter::wait, Release());
  py::class_<CutWriting>(m, "CutWriting")
      .def(py::init([](SnapshotWriter& writer, const std::shared_ptr<StrategyCore>& core) {
             const auto pass = core->session().enter();
             return std::make_unique<CutWriting>(writer, core->sets());
           }),
           "writer"_a, "core"_a, py::call_guard<Interruptible>(), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def(
          "stand_in",
          [](CutWriting& cut, int parameter) -> std::optional<at::Tensor> {
            auto tensor = cut.stand_in(parameter);
            return tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt;
          },
          "parameter"_a)
      .def(
          "start",
          [](CutWriting& cut, checkpoint::NamedTensors tensors, checkpoint::Metadata metadata) {
            cut.start({std::move(tensors), std::move(metadata)});
          },
          "tensors"_a, "metadata"_a, Release())
      .def("close", &CutWriting::close, Release());
  m.def(
      "read_newest_snapshot",
      [](const std::filesystem::path& folder)
          -> std::optional<std::tuple<checkpoint::NamedTensors, checkpoint::Metadata, std::filesystem::path>> {
        auto snapshot = checkpoint::read_newest_snapshot(folder);
        if (!snapshot) return std::nullopt;
        return std::tuple(std::move(snapshot->tensors), std::move(snapshot->metadata), std::move(snapshot->folder));
      },
      "folder"_a, Release());
  py::class_<SavingSchedule>(m, "SavingSchedule")
      .def(py::init([](std::optional<int64_t> every, std::optional<double> seconds, std::function<double()> now,
                       std::function<int64_t(int64_t)> number_of_chief) {
             return std::make_unique<SavingSchedule>(
                 SavingSchedule::Options{.every = every,
                                         .seconds = seconds,
                                         .now = std::move(now),
                                         .number_of_chief = std::move(number_of_chief)});
           }),
           "every"_a, "seconds"_a, "now"_a, "number_of_chief"_a)
      .def("note_step", &SavingSchedule::note_step, "steps"_a)
      .def_property_readonly("is_due", &SavingSchedule::is_due)
      .def("start_over", &SavingSchedule::start_over);
  m.def("has_sha256", &checkpoint::has_sha256);
  m.def(
      "sign_snapshot",
      [](const std::filesystem::path& folder) {
        const auto secret = net::job_secret();
        if (!secret) {
          throw InvalidArgument(
              "no job secret is set to sign with; MUSTER_SECRET_FILE=FILE names the file that has it");
        }
        checkpoint::sign_snapshot(folder, *secret);
      },
      "folder"_a, Release());
}

}  // namespace muster
