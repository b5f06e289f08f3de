#include "strategy/loaders.h"

#include "bindings/bindings.h"
#include "bindings/callbacks.h"
#include "bindings/interruptible.h"

namespace muster {

namespace {

namespace py = pybind11;

// What a Python loop keeps while it iterates.
struct PassHold {
  std::shared_ptr<void> hold;
};

// Of a PassProgress: epoch, batches, next, undone.
using PassTuple = std::tuple<uint64_t, uint64_t, uint64_t, std::vector<uint64_t>>;

void bind_passes(py::module_& m) {
  using detail::DealtPass;
  using detail::LoaderPass;
  using detail::SharedPass;
  const py::class_<PassHold> hold(m, "PassHold");
  py::class_<LoaderPass, std::shared_ptr<LoaderPass>>(m, "LoaderPass")
      .def("next", &LoaderPass::next, py::call_guard<Interruptible>())
      .def("yielded", &LoaderPass::yielded)
      .def("lost", &LoaderPass::lost)
      .def("done", &LoaderPass::done)
      .def("wait_for_more", &LoaderPass::wait_for_more, py::call_guard<Interruptible>())
      .def("begin_step",
           [](LoaderPass& pass) -> std::optional<std::tuple<uint32_t, uint64_t, uint64_t>> {
             const auto batch = pass.begin_step();
             if (!batch) return std::nullopt;
             return std::tuple(batch->loader, batch->epoch, batch->batch);
           })
      .def("hold", [](LoaderPass& pass) { return PassHold{pass.hold()}; });
  const py::class_<DealtPass, LoaderPass, std::shared_ptr<DealtPass>> dealt(m, "DealtPass");
  py::class_<SharedPass, LoaderPass, std::shared_ptr<SharedPass>>(m, "SharedPass")
      .def("part_of",
           [](const SharedPass& pass, int64_t number) {
             const auto part = pass.part_of(number);
             return std::tuple(part.batch, part.begin, part.sizes);
           })
      .def_property_readonly("oldest_position", &SharedPass::oldest_position)
      .def("skip", &SharedPass::skip, "batches"_a)
      .def("num_trained", &SharedPass::num_trained)
      .def("end", &SharedPass::end);
}

detail::SharedPass::NextBatch next_batch_of(const py::object& function) {
  return [kept = keep(function)] {
    const py::gil_scoped_acquire gil;
    return py::cast<std::optional<int64_t>>((*kept)());
  };
}

}  // namespace

void bind_loaders(py::module_& m) {
  bind_passes(m);
  using detail::LoaderProgress;
  py::class_<LoaderProgress, std::shared_ptr<LoaderProgress>>(m, "LoaderProgress")
      .def(py::init<>())
      .def_readwrite("at_end", &LoaderProgress::at_end)
      .def_readwrite("in_step", &LoaderProgress::in_step)
      .def_readwrite("in_run", &LoaderProgress::in_run)
      .def_readwrite("usual_rows", &LoaderProgress::usual_rows)
      .def_readwrite("last_pass", &LoaderProgress::pass)
      .def("begin_pass", &LoaderProgress::begin_pass)
      .def("note_yield", &LoaderProgress::note_yield, "is_last"_a)
      .def("leave", &LoaderProgress::leave, "number"_a);
  py::enum_<detail::WindowEnd>(m, "WindowEnd")
      .value("closed", detail::WindowEnd::closed)
      .value("dropped", detail::WindowEnd::dropped);
  py::class_<Loaders>(m, "Loaders")
      .def(py::init([](std::shared_ptr<StrategyCore> core, const py::object& connect) {
             return std::make_unique<Loaders>(std::move(core), callback(connect));
           }),
           py::arg("core"), py::arg("connect"))
      .def(
          "add",
          [](Loaders& l, const std::shared_ptr<LoaderProgress>& loader, const std::string& size) {
            return l.add(loader, nullptr, size);
          },
          "loader"_a, "size"_a, py::call_guard<Interruptible>())
      .def_property_readonly("are_dealt", [](const Loaders& l) { return l.job().division == detail::Division::none; })
      .def("stays_open", &Loaders::stays_open, "set"_a)
      .def(
          "has_ended",
          [](Loaders& l, int set,
             const std::vector<std::tuple<std::shared_ptr<LoaderProgress>, int64_t, bool>>& batches) {
            std::vector<Loaders::Stepped> stepped;
            for (const auto& [loader, batch, is_last] : batches) stepped.push_back({loader, batch, is_last});
            return l.has_ended(set, stepped);
          },
          "set"_a, "batches"_a)
      .def("deal", &Loaders::deal, py::call_guard<Interruptible>())
      .def(
          "share",
          [](Loaders& l, int loader, int64_t epoch, const py::object& next_batch) {
            auto next = next_batch_of(next_batch);
            const Interruptible interruptible;
            return l.share(loader, epoch, std::move(next));
          },
          py::arg("loader"), py::arg("epoch"), py::arg("next_batch"))
      .def("leave_passes", &Loaders::leave_passes, py::call_guard<Interruptible>())
      .def(
          "passes_of",
          [](Loaders& l, int loader, int64_t epoch) {
            std::vector<PassTuple> passes;
            for (const auto& pass : l.passes_of(loader, epoch)) {
              passes.emplace_back(pass.epoch, pass.batches, pass.next, pass.undone);
            }
            return passes;
          },
          py::arg("loader"), py::arg("epoch"), py::call_guard<Interruptible>())
      .def(
          "go_on",
          [](Loaders& l, int loader, const std::vector<PassTuple>& passes) {
            std::vector<server::PassProgress> all;
            for (const auto& [epoch, batches, next, undone] : passes) {
              all.push_back({static_cast<uint32_t>(loader), epoch, batches, next, undone});
            }
            l.go_on(loader, all);
          },
          py::arg("loader"), py::arg("passes"))
      .def("joined", [](Loaders& l, const py::bytes& standings) { l.joined(standings); })
      .def("end_step", &Loaders::end_step, Release())
      .def("note_step", &Loaders::note_step, "set"_a, "stepped"_a, Release());
}

}  // namespace muster
