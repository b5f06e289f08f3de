#include "strategy/strategy_core.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/bindings.h"
#include "bindings/callbacks.h"
#include "bindings/embedding.h"
#include "bindings/interruptible.h"
#include "bindings/optimizer.h"
#include "bindings/options.h"
#include "bindings/thread_interrupt.h"
#include "comm/text_exchange.h"
#include "core/heap.h"
#include "gradient/post_hook.h"
#include "muster/batch.h"
#include "muster/cluster.h"
#include "strategy/build.h"
#include "strategy/collectives.h"
#include "strategy/explain.h"
#include "strategy/registration.h"
#include "strategy/sigterm.h"

namespace muster {
namespace {

namespace py = pybind11;

Loss loss_of(const py::tuple& record) {
  Loss loss;
  loss.value = py::cast<at::Tensor>(record[0]);
  if (!record[1].is_none()) loss.weight = py::cast<at::Tensor>(record[1]);
  for (const auto& [name, value] : py::cast<py::dict>(record[2])) {
    loss.metrics[py::cast<std::string>(name)] = py::cast<at::Tensor>(value);
  }
  loss.reduction = py::cast<bool>(record[3]) ? Reduction::sum : Reduction::mean;
  return loss;
}

// `call(local_replica)` returns (value, weight or None, metrics, is_sum) for a step, anything for run.
StepCall step_call(const py::object& call, std::vector<int64_t> rows, const py::object& interrupt, bool is_step) {
  StepCall step;
  step.call = [kept = keep(call), is_step](int local_replica) {
    const py::gil_scoped_acquire gil;
    const py::object result = (*kept)(local_replica);
    return is_step ? loss_of(py::cast<py::tuple>(result)) : Loss();
  };
  step.rows = std::move(rows);
  step.poll = check_signals;
  step.interrupt = callback(interrupt);
  return step;
}

// Of (flat optimizer, its parameters' numbers, algorithm, rows of hyperparameters), or hyperparameters in words.
std::vector<OptimizerStep> optimizer_steps_of(const py::object& given) {
  std::vector<OptimizerStep> steps;
  for (const auto& item : given) {
    if (py::isinstance<py::list>(item)) {
      steps.push_back({.hyperparameters = py::cast<std::vector<std::string>>(item)});
      continue;
    }
    const auto fields = py::cast<py::tuple>(item);
    steps.push_back(
        {&py::cast<FlatOptimizer&>(fields[0]), py::cast<std::vector<int>>(fields[1]),
         flat_groups(py::cast<std::string>(fields[2]), py::cast<std::vector<std::vector<double>>>(fields[3]))});
  }
  return steps;
}

// `optimizers` as optimizer_steps_of's; `before_update` returns (algorithm, rows of hyperparameters) of each, as hooks
// and the user's function left them.
void add_update(StepCall& step, const py::object& optimizers, const py::object& before_update,
                const py::object& update_from_grad) {
  step.optimizers = optimizer_steps_of(optimizers);
  step.update_from_grad = callback(update_from_grad);
  if (before_update.is_none()) return;
  step.before_update = [kept = keep(before_update)] {
    const py::gil_scoped_acquire gil;
    std::vector<FlatGroups> groups;
    for (const auto& [algorithm, rows] :
         py::cast<std::vector<std::pair<std::string, std::vector<std::vector<double>>>>>((*kept)())) {
      groups.push_back(flat_groups(algorithm, rows));
    }
    return groups;
  };
}

py::dict in_python(const StepResult& result) {
  using py::literals::operator""_a;
  return py::dict("stepped"_a = result.stepped, "step"_a = result.step, "loss"_a = result.loss,
                  "metrics"_a = result.metrics, "weight"_a = result.weight,
                  "grad_norm"_a = result.grad_norm.defined() ? py::cast(result.grad_norm) : py::none(),
                  "skipped"_a = result.skipped, "loss_scale"_a = result.loss_scale);
}

using Core = std::shared_ptr<StrategyCore>;

// Empty once the strategy is closed, but for a thread that is in a call of it.
std::optional<CallGate::Pass> entered(StrategyCore& core) {
  try {
    return core.session().enter();
  } catch (const InvalidArgument&) {
    return std::nullopt;
  }
}

std::vector<Contribution> contributions(const std::vector<std::pair<Leaves, double>>& values) {
  std::vector<Contribution> result;
  for (const auto& [leaves, weight] : values) result.push_back({leaves, weight});
  return result;
}

using CoreClass = py::class_<StrategyCore, Core>;

// Of the job, and what it has done.
void bind_facts(CoreClass& core) {
  core.def_property_readonly("num_workers", [](const StrategyCore& c) { return c.session().topology().num_workers; })
      .def_property_readonly("num_replicas", [](const StrategyCore& c) { return c.session().topology().num_replicas; })
      .def_property_readonly("rank", [](const StrategyCore& c) { return c.session().topology().rank; })
      .def_property_readonly("local_rank", [](const StrategyCore& c) { return c.session().topology().local_rank; })
      .def_property_readonly("first_replica",
                             [](const StrategyCore& c) { return c.session().topology().first_replica; })
      .def_property_readonly("local_replicas",
                             [](const StrategyCore& c) { return c.session().topology().local_replicas(); })
      .def_property_readonly("devices", [](const StrategyCore& c) { return c.session().topology().devices; })
      .def_property_readonly("threads_per_replica",
                             [](StrategyCore& c) { return c.session().pool().threads_per_replica(); })
      .def(
          "explain", [](StrategyCore& c, const std::string& name) { return explain(c.session(), name); },
          py::arg("name"))
      .def_property_readonly("seed", [](StrategyCore& c) { return c.session().streams().seed(); })
      .def_property_readonly("capacities", [](const StrategyCore& c) { return c.session().capacities(); })
      .def_property_readonly("steps", [](const StrategyCore& c) { return c.stepper().steps(); })
      .def_property_readonly("calls", [](StrategyCore& c) { return c.session().streams().calls(); })
      .def("go_on_after", [](StrategyCore& c, int64_t steps, uint64_t calls,
                             uint64_t seed) { c.stepper().go_on_after(steps, calls, seed); })
      .def_property_readonly("stopping", [](const StrategyCore& c) { return c.stepper().stopping(); })
      .def_property_readonly("closed", [](const StrategyCore& c) { return c.session().closed(); })
      .def_property_readonly("joins", [](const StrategyCore& c) { return c.session().groups().joins(); })
      .def_property_readonly("busy",
                             py::cpp_function([](const StrategyCore& c) { return c.session().busy(); }, Release()))
      .def_property_readonly("current_local_replica",
                             [](const StrategyCore& c) { return c.session().current_local_replica(); })
      .def_property_readonly("current_rows", [](StrategyCore& c) { return c.stepper().replicas().current_rows(); });
}

void bind_lifetime(CoreClass& core) {
  // Its threads stay until the strategy ends: the interpreter's exit, which joins them, is not to wait for their GIL.
  core.def(
          "serve", [](StrategyCore& c, int local_replica) { c.session().pool().serve(local_replica); },
          py::call_guard<py::gil_scoped_release>())
      .def("check_alone", [](StrategyCore& c, const std::string& what) { (void)c.session().enter_alone(what.c_str()); })
      .def("stop", [](StrategyCore& c) { c.stepper().stop(); })
      .def(
          "close", [](StrategyCore& c) { c.close(check_signals); }, Release())
      .def("leave", &StrategyCore::leave);
}

void bind_registration(CoreClass& core) {
  core.def(
          "add_module",
          [](StrategyCore& c, std::vector<NamedTensors> parameters, std::vector<NamedTensors> buffers) {
            return add_module(c.session(), {std::move(parameters), std::move(buffers)});
          },
          py::call_guard<Interruptible>())
      .def("expect_writes", [](StrategyCore& c, const at::Tensor& parameter) { expect_writes(c.session(), parameter); })
      .def(
          "note_rows",
          [](StrategyCore& c, const at::Tensor& weight, const std::string& kind, double scale, uint64_t seed,
             const std::string& placement, bool row_wise_adagrad) {
            note_rows(c.session(), weight,
                      {row_initialiser(kind, scale, seed),
                       placement == "modulo" ? RowPlacement::modulo : RowPlacement::range, row_wise_adagrad});
          },
          py::arg("weight"), py::arg("kind"), py::arg("scale"), py::arg("seed"), py::arg("placement"),
          py::arg("row_wise_adagrad"), py::call_guard<Interruptible>())
      .def("set_buffers",
           [](StrategyCore& c, int module, size_t local_replica, const std::vector<at::Tensor>& buffers) {
             c.session().registry().set_buffers(module, local_replica, buffers);
           })
      .def("find", [](StrategyCore& c, const at::Tensor& parameter) { return c.session().registry().find(parameter); })
      .def("parameters_of", [](StrategyCore& c, int module) { return c.session().registry().parameters_of(module); })
      .def("name_of", [](StrategyCore& c, size_t parameter) { return c.session().registry().name(parameter); });
}

void bind_calls(CoreClass& core) {
  core.def("step",
           [](StrategyCore& c, const py::object& call, std::vector<int64_t> rows, int set, bool loader_ended,
              const py::object& optimizers, const py::object& before_update, const py::object& update_from_grad,
              const py::object& interrupt, const std::vector<std::tuple<uint32_t, uint64_t, uint64_t>>& batches,
              double usual_rows) {
             auto step = step_call(call, std::move(rows), interrupt, /*is_step=*/true);
             step.set = set;
             step.loader_ended = loader_ended;
             add_update(step, optimizers, before_update, update_from_grad);
             step.usual_rows = usual_rows;
             for (const auto& [loader, epoch, batch] : batches) step.batches.push_back({loader, epoch, batch});
             StepResult result;
             {
               const WithoutGil without_gil;
               result = c.stepper().step(step);
             }
             return in_python(result);
           })
      .def("flush",
           [](StrategyCore& c, const std::vector<std::tuple<int, py::object, py::object, py::object>>& given) {
             std::vector<StepCall> updates;
             for (const auto& [set, optimizers, before_update, update_from_grad] : given) {
               updates.emplace_back().set = set;
               updates.back().poll = check_signals;
               add_update(updates.back(), optimizers, before_update, update_from_grad);
             }
             std::optional<StepResult> result;
             {
               const WithoutGil without_gil;
               result = c.stepper().flush(updates, c.session().options().drop_incomplete);
             }
             return result ? py::object(in_python(*result)) : py::none();
           })
      .def("run", [](StrategyCore& c, const py::object& call, std::vector<int64_t> rows, const py::object& interrupt) {
        const auto run = step_call(call, std::move(rows), interrupt, /*is_step=*/false);
        const WithoutGil without_gil;
        c.stepper().run(run);
      });
}

// Of optimizers, sets and servers.
void bind_state(CoreClass& core) {
  core.def("check_need_no_flat", [](const StrategyCore& c, const std::vector<int>& parameters) {
    check_need_no_flat(c.session(), parameters);
  });
  core.def("make_flat",
           [](StrategyCore& c, const std::string& algorithm, const std::vector<std::pair<int, uint32_t>>& parameters,
              const std::vector<std::vector<double>>& groups) {
             return make_flat(c.session(), parameters, flat_groups(algorithm, groups));
           })
      .def("on_leaving", [](StrategyCore& c, const py::object& leave) { c.on_leaving(callback(leave)); })
      .def("open_sets", [](const StrategyCore& c) { return c.sets().open(); })
      .def("num_updates", [](StrategyCore& c, int set) { return c.stepper().updates().count(set); })
      .def("set_has_hooks",
           [](StrategyCore& c, int set, bool has_hooks) { c.sets().at(set).told().has_hooks = has_hooks; })
      .def("hooked", [](StrategyCore& c, int set) { return c.sets().at(set).told().hooked; })
      .def("call_hooks",
           [](StrategyCore& c, int set, bool is_first, const py::object& hooks) {
             const auto call = callback(hooks);
             const Interruptible interruptible;
             c.stepper().updates().call_hooks(set, /*fused=*/false, is_first, call);
           })
      .def(
          "whole_state",
          [](StrategyCore& c, const FlatOptimizer& flat, size_t parameter, size_t which) -> std::optional<at::Tensor> {
            const auto pass = c.session().enter();
            const auto whole = flat.state().whole(parameter, which, c.session().workers("state_dict()"));
            return whole.defined() ? std::optional(whole) : std::nullopt;
          },
          py::call_guard<Interruptible>())
      .def("awaits_servers", [](const StrategyCore& c, int set) { return c.sets().awaits_servers(set); })
      .def(
          "connect_servers",
          [](StrategyCore& c, int set, FlatOptimizer& flat, const std::vector<int>& parameters,
             const std::string& algorithm, const std::vector<std::vector<double>>& groups) {
            const auto pass = c.session().enter();
            c.sets().connect_servers(set, flat, parameters, flat_groups(algorithm, groups));
          },
          py::call_guard<Interruptible>())
      .def("watch",
           [](StrategyCore& c, int set, const py::object& optimizers, const py::object& before_update,
              const py::object& update_from_grad) {
             StepCall update;
             update.set = set;
             update.poll = check_signals;
             add_update(update, optimizers, before_update, update_from_grad);
             std::string standings;
             {
               const WithoutGil without_gil;
               const auto pass = c.session().enter();
               standings = c.stepper().watch(update);
             }
             return py::bytes(standings);
           })
      .def_property_readonly("has_servers",
                             [](StrategyCore& c) {
                               if (c.is_leaving()) return c.sets().has_servers();
                               const auto pass = entered(c);
                               return pass && c.sets().has_servers();
                             })
      .def(
          "state_on_servers",
          [](StrategyCore& c, const std::vector<int>& parameters, const std::vector<server::Part>& parts,
             bool to_stay) {
            std::optional<CallGate::Pass> pass;
            if (!c.is_leaving()) pass.emplace(c.session().enter());
            std::vector<std::vector<std::optional<at::Tensor>>> values;
            for (const auto& of_part : c.state_on_servers(parameters, parts, to_stay)) {
              auto& own = values.emplace_back();
              for (const auto& value : of_part) own.push_back(value.defined() ? std::optional(value) : std::nullopt);
            }
            return values;
          },
          py::call_guard<Interruptible>())
      .def("loss_scale",
           [](StrategyCore& c, int set) {
             const auto pass = c.session().enter();
             const auto state = c.sets().at(set).window().loss_scale().get();
             return std::pair<double, int>(state.scale, state.growth_tracker);
           })
      .def("set_loss_scale",
           [](StrategyCore& c, int set, double scale, int growth_tracker) {
             const auto pass = c.session().enter();
             c.sets().at(set).window().loss_scale().set({static_cast<float>(scale), growth_tracker});
           })
      .def("unit",
           [](StrategyCore& c, int set) {
             const auto pass = c.session().enter();
             return c.sets().at(set).window().loss_scale().unit();
           })
      .def("set_unit", [](StrategyCore& c, int set, double unit) {
        const auto pass = c.session().enter();
        c.sets().at(set).window().loss_scale().set_unit(unit);
      });
}

void bind_collectives_in_step(CoreClass& core) {
  core.def(
          "reduce_in_step",
          [](StrategyCore& c, const Leaves& values, ReduceOp op, const at::Tensor& weight) {
            return reduce_in_step(c.stepper().replicas().step_group(values), values, op, weight);
          },
          py::call_guard<Interruptible>())
      .def(
          "gather_in_step",
          [](StrategyCore& c, const Leaves& values, bool equal_sizes) {
            return gather_in_step(c.stepper().replicas().step_group(values), values,
                                  equal_sizes ? comm::GatherSizes::equal : comm::GatherSizes::any);
          },
          py::arg("values"), py::arg("equal_sizes") = false, py::call_guard<Interruptible>())
      .def(
          "broadcast_in_step",
          [](StrategyCore& c, const Leaves& values, int source) {
            return broadcast_in_step(c.stepper().replicas().step_group(values), values, source);
          },
          py::call_guard<Interruptible>())
      .def(
          "barrier_in_step", [](StrategyCore& c) { barrier_in_step(c.stepper().replicas().step_group()); },
          py::call_guard<Interruptible>())
      .def("sum_in_backward", [](StrategyCore& c, const at::Tensor& value) {
        return py::cpp_function(sum_in_backward(c.stepper().replicas().step_group({value})),
                                py::call_guard<Interruptible>());
      });
}

// Outside of steps.
void bind_collectives(CoreClass& core) {
  core.def(
          "reduce",
          [](StrategyCore& c, const std::vector<std::pair<Leaves, double>>& values, ReduceOp op) {
            const auto pass = c.session().enter();
            return reduce_over_workers(c.session().workers("reduce()"), contributions(values), op);
          },
          py::call_guard<Interruptible>())
      .def(
          "gather",
          [](StrategyCore& c, const std::vector<std::pair<Leaves, double>>& values) {
            const auto pass = c.session().enter();
            return gather_over_workers(c.session().workers("gather()"), contributions(values));
          },
          py::call_guard<Interruptible>())
      .def(
          "broadcast",
          [](StrategyCore& c, const Leaves& values, int source, bool to_others) {
            const auto pass = c.session().enter();
            return (to_others ? send_over_workers : broadcast_over_workers)(c.session().workers("broadcast()"), values,
                                                                            source);
          },
          py::arg("values"), py::arg("source"), py::arg("to_others") = false, py::call_guard<Interruptible>())
      .def(
          "exchange_texts",
          [](StrategyCore& c, const std::string& text, const std::string& call) {
            const auto pass = c.session().enter();
            return exchange_texts(c.session().workers(call), text);
          },
          py::arg("text"), py::arg("call"), py::call_guard<Interruptible>())
      .def(
          "barrier",
          [](StrategyCore& c) {
            const auto pass = c.session().enter();
            c.session().workers("barrier()").barrier().wait();
          },
          py::call_guard<Interruptible>());
}

}  // namespace

void bind_strategy(py::module_& m) {
  py::enum_<ReduceOp>(m, "ReduceOp")
      .value("sum", ReduceOp::sum)
      .value("mean", ReduceOp::mean)
      .value("min", ReduceOp::min)
      .value("max", ReduceOp::max);
  py::enum_<server::Part>(m, "ServerPart", "A part of what parameter servers hold.")
      .value("state0", server::Part::state0)
      .value("state1", server::Part::state1)
      .value("state2", server::Part::state2)
      .value("master", server::Part::master)
      .value("steps", server::Part::steps);
  CoreClass core(m, "StrategyCore");
  bind_facts(core);
  bind_lifetime(core);
  bind_registration(core);
  bind_calls(core);
  bind_state(core);
  bind_collectives_in_step(core);
  bind_collectives(core);
  m.def("part_sizes", [](int64_t n, const std::vector<double>& capacities) {
    return detail::part_sizes(n, static_cast<int>(capacities.size()), capacities);
  });
  m.def("make_mirrored", [](const std::vector<std::string>& devices, const py::dict& options, bool balances) {
    const auto parsed = options_of(options);
    const WithoutGil without_gil;
    return of_python(
        make_mirrored(devices, parsed, balances ? Balance::automatic : Balance::equal, ReplicaThreads::foreign));
  });
  m.def(
      "make_multi_worker", [](const Cluster& cluster, const std::vector<std::string>& devices, const py::dict& options,
                              const comm::ProcessGroupPtr& process_group, const std::optional<SeveralHosts>& several) {
        const auto parsed = options_of(options);
        const Interruptible interruptible;
        return of_python(make_multi_worker(cluster, devices, parsed, ReplicaThreads::foreign, process_group, several));
      });
  m.def("return_freed_memory", &return_freed_memory, Release());
  m.def("let_sigterm_end", &SigtermWatch::let_end);
  m.def("refuse_compiled_autograd", &refuse_compiled_autograd);
  m.def("make_parameter_server", [](const Cluster& cluster, const std::vector<std::string>& devices,
                                    const ServerOptions& servers, const py::dict& options) {
    const auto parsed = options_of(options);
    const Interruptible interruptible;
    return of_python(make_parameter_server(cluster, devices, servers, parsed, ReplicaThreads::foreign));
  });
  m.def("interrupt_thread", &interrupt_thread,
        "Raises `exception` in the Python thread of this identity at its next bytecode; None withdraws one.");
}

}  // namespace muster
