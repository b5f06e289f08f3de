#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/interruptible.h"
#include "checkpoint/asked_snapshot.h"
#include "checkpoint/joint_snapshot.h"
#include "checkpoint/saved_tree.h"
#include "checkpoint/sha256.h"
#include "checkpoint/snapshot_writer.h"
#include "muster/error.h"
#include "net/job_secret.h"
#include "strategy/cut_writing.h"
#include "strategy/gathered_snapshot.h"
#include "strategy/saving_schedule.h"
#include "strategy/strategy_core.h"

namespace muster {

namespace py = pybind11;
using py::literals::operator""_a;

void bind_saving(py::module_& m) {
  using checkpoint::SnapshotWriter;
  py::class_<SnapshotWriter, Owned<SnapshotWriter>>(m, "SnapshotWriter")
      .def(py::init([](std::filesystem::path folder, std::optional<int> keep) {
             return Owned<SnapshotWriter>(
                 new SnapshotWriter(std::move(folder), checkpoint::SnapshotOptions{.keep = keep}));
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
  using checkpoint::JointSnapshot;
  using checkpoint::Run;
  py::class_<Run>(m, "Run").def_property_readonly(
      "whole_bytes", [](const Run& run) { return c10::multiply_integers(run.shape) * run.elements.element_size(); });
  py::class_<JointSnapshot>(m, "JointSnapshot")
      .def(py::init([](SnapshotWriter& writer, const std::shared_ptr<StrategyCore>& core) {
             const auto& session = core->session();
             return std::make_unique<JointSnapshot>(writer, session.topology().rank, session.groups().store);
           }),
           "writer"_a, "core"_a, py::keep_alive<1, 2>())
      .def("announce", &JointSnapshot::announce, "lineage"_a, Release())
      .def(
          "look",
          [](JointSnapshot& joint, const std::vector<std::string>& announced, checkpoint::NamedTensors chiefs,
             checkpoint::NamedTensors alike, std::map<std::string, Run> divided) {
            std::vector<Run> runs;
            for (auto& [name, run] : divided) runs.push_back({name, run.shape, run.begin, run.elements});
            return joint.look(announced, {std::move(chiefs), std::move(alike), std::move(runs)});
          },
          "announced"_a, "chiefs"_a, "alike"_a, "divided"_a, Release())
      .def("copy", &JointSnapshot::copy, "looked"_a, Release())
      .def(
          "start",
          [](JointSnapshot& joint, const checkpoint::Metadata& metadata, double patience) {
            joint.start(metadata, to_ms(patience));
          },
          "metadata"_a, "patience"_a, Release())
      .def("close", &JointSnapshot::close, Release());
  py::class_<CutWriting>(m, "CutWriting")
      .def(py::init([](SnapshotWriter& writer, const std::shared_ptr<StrategyCore>& core) {
             return std::make_unique<CutWriting>(writer, *core);
           }),
           "writer"_a, "core"_a, py::call_guard<Interruptible>(), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def_property_readonly("is_begun", &CutWriting::is_begun)
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
      "read_asked_snapshot",
      [](const std::filesystem::path& path, const std::shared_ptr<StrategyCore>& core)
          -> std::optional<std::tuple<checkpoint::NamedTensors, checkpoint::Metadata, std::filesystem::path>> {
        std::optional<checkpoint::StoredSnapshot> snapshot;
        if (core) {
          const auto pass = core->session().enter();
          snapshot = read_asked_snapshot(core->session().workers("load()"), path);
        } else {
          snapshot = checkpoint::read_asked_snapshot(path, checkpoint::Memory::of_file);
          if (snapshot) checkpoint::copy_what_is_kept(snapshot->tensors);
        }
        if (!snapshot) return std::nullopt;
        return std::tuple(std::move(snapshot->tensors), std::move(snapshot->metadata), std::move(snapshot->folder));
      },
      "path"_a, "core"_a = std::shared_ptr<StrategyCore>(), py::call_guard<Interruptible>());
  m.def(
      "kept_metric",
      [](const std::filesystem::path& folder, const std::shared_ptr<StrategyCore>& core) {
        const auto pass = core->session().enter();
        const auto found = kept_metric(core->session().workers("best()"), folder);
        return found ? std::optional(std::pair(found->value, found->mode)) : std::nullopt;
      },
      "folder"_a, "core"_a, py::call_guard<Interruptible>());
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
