#include <pybind11/stl.h>

#include "bindings.h"
#include "memory.h"
#include "zc/comm/plan_communicator.h"
#include "zc/comm/topology.h"
#include "zc/engine/reductions.h"
#include "zc/engine/step_engine.h"
#include "zc/math/loss_scale.h"

namespace py = pybind11;
using zc::engine::StateKind;
using zc::engine::StepEngine;
using NoGil = py::call_guard<py::gil_scoped_release>;

namespace {

void bind_optimizers(py::module_& m) {
  using zc::math::AdagradHyper;
  using zc::math::AdamHyper;
  using zc::math::ForeignHyper;
  using zc::math::LionHyper;
  using zc::math::MuonHyper;
  using zc::math::SgdHyper;
  py::class_<AdamHyper>(m, "AdamHyper")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay,
                       bool decoupled_weight_decay, bool bias_correction) {
             return AdamHyper{lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, bias_correction};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
           py::arg("decoupled_weight_decay"), py::arg("bias_correction"));
  py::class_<SgdHyper>(m, "SgdHyper")
      .def(py::init([](double lr, double momentum, double dampening, double weight_decay, bool nesterov) {
             return SgdHyper{lr, momentum, dampening, weight_decay, nesterov};
           }),
           py::kw_only(), py::arg("lr"), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"),
           py::arg("nesterov"));
  py::class_<LionHyper>(m, "LionHyper")
      .def(py::init([](double lr, double beta1, double beta2, double weight_decay) {
             return LionHyper{lr, beta1, beta2, weight_decay};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("weight_decay"));
  py::class_<AdagradHyper>(m, "AdagradHyper")
      .def(py::init([](double lr, double lr_decay, double eps, double weight_decay, double initial_accumulator) {
             return AdagradHyper{lr, lr_decay, eps, weight_decay, initial_accumulator};
           }),
           py::kw_only(), py::arg("lr"), py::arg("lr_decay"), py::arg("eps"), py::arg("weight_decay"),
           py::arg("initial_accumulator"));
  py::class_<MuonHyper>(m, "MuonHyper")
      .def(py::init([](double lr, double momentum, double weight_decay, bool nesterov, int iterations) {
             return MuonHyper{lr, momentum, weight_decay, nesterov, iterations};
           }),
           py::kw_only(), py::arg("lr"), py::arg("momentum"), py::arg("weight_decay"), py::arg("nesterov"),
           py::arg("iterations"));
  py::class_<ForeignHyper>(m, "ForeignHyper").def(py::init<>());
}

// The loss scale that an engine keeps.
void bind_loss_scale(py::module_& m, py::class_<StepEngine>& engine) {
  using zc::math::LossScaleRule;
  py::class_<LossScaleRule>(m, "LossScaleRule", "Static or dynamic loss scale; the rule is zc/math/loss_scale.h's.")
      .def(py::init([](bool dynamic, double initial_scale, std::int64_t window, std::int64_t hysteresis,
                       bool consecutive_hysteresis, double min_scale) {
             return LossScaleRule{dynamic, initial_scale, window, hysteresis, consecutive_hysteresis, min_scale};
           }),
           py::kw_only(), py::arg("dynamic"), py::arg("initial_scale"), py::arg("window"), py::arg("hysteresis"),
           py::arg("consecutive_hysteresis"), py::arg("min_scale"));
  // Waits for the device go without the interpreter's lock.
  engine
      .def_property_readonly("loss_scale",
                             [](StepEngine& self) {
                               const py::gil_scoped_release unlocked;
                               return self.loss_scale().scale;
                             })
      .def(
          "loss_scale_address",
          [](StepEngine& self) { return reinterpret_cast<std::uintptr_t>(self.loss_scale_memory().data); }, NoGil(),
          "Of an fp32 value in the device's memory.")
      .def_property(
          "loss_scale_state",
          [](StepEngine& self) {
            const py::gil_scoped_release unlocked;
            const auto& s = self.loss_scale();
            return std::tuple(s.scale, s.iteration, s.last_overflow, s.hysteresis);
          },
          [](StepEngine& self, std::tuple<double, std::int64_t, std::int64_t, std::int64_t> s) {
            self.set_loss_scale({std::get<0>(s), std::get<1>(s), std::get<2>(s), std::get<3>(s)});
          },
          "All that changes: (scale, iteration, last overflow, overflows left until the scale halves).");
}

// What checkpoints need: ranges are (begin, end), memory is (address, bytes).
void bind_checkpoint(py::class_<StepEngine>& engine) {
  const auto pair = [](StepEngine::Range range) { return std::pair(range.begin, range.end); };
  const auto memory = [](zc::BufferView view) {
    return std::pair(reinterpret_cast<std::uintptr_t>(view.data), view.bytes());
  };
  engine.def("saved_range", [pair](const StepEngine& self, int param) { return pair(self.saved_range(param)); })
      .def("loaded_range", [pair](const StepEngine& self, int param) { return pair(self.loaded_range(param)); })
      .def("state_memory", [memory](const StepEngine& self, int param, StateKind kind, std::int64_t begin,
                                    std::int64_t end) { return memory(self.state_memory(param, kind, {begin, end})); })
      .def("kept_memory", [memory](const StepEngine& self, int param, std::int64_t begin,
                                   std::int64_t end) { return memory(self.kept_memory(param, {begin, end})); })
      .def("param_steps",
           [](StepEngine& self) {
             const py::gil_scoped_release unlocked;
             const auto steps = self.param_steps();
             return std::vector<std::int64_t>(steps.begin(), steps.end());
           })
      .def(
          "set_loaded", [](StepEngine& self, const std::vector<std::int64_t>& steps) { self.set_loaded(steps); },
          NoGil());
}

// The gatherer's calls, with its plans as (units to release, units to gather); None: nothing to do.
void bind_gatherer(py::class_<StepEngine>& engine) {
  using Gatherer = zc::zero::ParamGatherer;
  using Lists = std::optional<std::pair<std::vector<int>, std::vector<int>>>;
  const auto lists = [](Gatherer::Plan plan) -> Lists {
    if (plan.release.empty() && plan.gather.empty()) return std::nullopt;
    return std::pair(std::move(plan.release), std::move(plan.gather));
  };
  engine
      .def("unit_buckets",
           [](StepEngine& self, int unit) {
             std::vector<std::tuple<int, std::int64_t, zc::DType>> out;  // (bucket, elements, compute dtype)
             for (int bucket : self.gatherer().buckets(unit)) {
               const auto& layout = self.layout().buckets()[static_cast<std::size_t>(bucket)];
               out.emplace_back(bucket, layout.numel, layout.compute_dtype);
             }
             return out;
           })
      .def("enter_unit", [lists](StepEngine& self, int unit, Gatherer::Pass pass,
                                 bool training) { return lists(self.gatherer().enter(unit, pass, training)); })
      .def("leave_unit",
           [lists](StepEngine& self, int unit, bool training) { return lists(self.gatherer().leave(unit, training)); })
      .def("need_unit", [lists](StepEngine& self, int unit) { return lists(self.gatherer().need(unit)); })
      .def("end_backward", [lists](StepEngine& self) { return lists(self.gatherer().end_backward()); })
      .def(
          "start_gather",
          [](StepEngine& self, int bucket, std::uintptr_t address) {
            const auto& layout = self.layout().buckets()[static_cast<std::size_t>(bucket)];
            self.gatherer().start(
                bucket, {reinterpret_cast<void*>(address), layout.numel, layout.compute_dtype, self.device().id()});
          },
          NoGil())
      .def(
          "wait_unit", [](StepEngine& self, int unit) { self.gatherer().wait(unit); }, NoGil())
      .def("end_gathers_of_micro_step", [](StepEngine& self) { self.gatherer().end_micro_step(); })
      .def("invalidate_units",
           [lists](StepEngine& self) {
             Gatherer::Plan plan;
             {
               py::gil_scoped_release unlocked;
               plan = self.gatherer().invalidate();
             }
             return lists(std::move(plan));
           })
      .def("live_numel", [](StepEngine& self) { return self.gatherer().live_numel(); })
      .def("peak_live_numel", [](StepEngine& self) { return self.gatherer().peak_live_numel(); })
      .def_property_readonly("gather_comm", &StepEngine::gather_comm);
}

}  // namespace

void bind_engine(py::module_& m) {
  bind_optimizers(m);

  m.def(
      "shard_group",
      [](zc::comm::Communicator& world) {
        return zc::comm::Topology{.dp = world.size()}.make_group(world, zc::comm::Role::kShard);
      },
      NoGil(), "The ranks over which this rank's model states are sharded. Collective.");
  m.def("plan_communicator", &zc::comm::make_plan_communicator, py::arg("size"),
        "A rank of a group that does not exist: what a StepEngine over it would allocate is addresses only.");
  m.def("exact_mean", &zc::engine::exact_mean, NoGil(), py::arg("comm"), py::arg("value"), py::arg("counts"),
        "The mean over the ranks that count, exact and rounded once. Collective.");
  m.def(
      "sum_weights",
      [](zc::comm::Communicator& comm, std::vector<double> weights, bool missing) {
        return zc::engine::sum_weights(comm, {std::move(weights), missing});
      },
      NoGil(), py::arg("comm"), py::arg("weights"), py::arg("missing"),
      "The exact sum of all ranks' weights of micro-batches, rounded once; None when there are none. Collective.");

  py::class_<zc::zero::ParamSpec>(m, "ParamSpec")
      .def(py::init([](std::string name, std::int64_t numel, zc::DType dtype, int group, int unit,
                       zc::DType compute_dtype, bool sharded, bool trainable, std::int64_t rows,
                       double rows_by_columns) {
             return zc::zero::ParamSpec{std::move(name), numel,   dtype,     group, unit,
                                        compute_dtype,   sharded, trainable, rows,  rows_by_columns};
           }),
           py::kw_only(), py::arg("name"), py::arg("numel"), py::arg("dtype"), py::arg("group"), py::arg("unit"),
           py::arg("compute_dtype"), py::arg("sharded"), py::arg("trainable"), py::arg("rows"),
           py::arg("rows_by_columns"));

  py::class_<zc::engine::StepResult>(m, "StepResult")
      .def_property_readonly("skipped", [](const zc::engine::StepResult& r) { return r.scalars.skip != 0; })
      .def_property_readonly("grad_norm", [](const zc::engine::StepResult& r) { return r.scalars.grad_norm; })
      .def_property_readonly("clip", [](const zc::engine::StepResult& r) { return r.scalars.clip; })
      .def_readonly("exhausted", &zc::engine::StepResult::exhausted)
      .def_readonly("nonfinite", &zc::engine::StepResult::nonfinite);

  py::enum_<StateKind>(m, "StateKind")
      .value("master", StateKind::kMaster)
      .value("state1", StateKind::kState1)
      .value("state2", StateKind::kState2)
      .value("grad", StateKind::kGrad);

  using Pass = zc::zero::ParamGatherer::Pass;
  py::enum_<Pass>(m, "Pass")
      .value("forward", Pass::kForward)
      .value("backward", Pass::kBackward)
      .value("demand", Pass::kDemand);

  py::class_<StepEngine> engine(m, "StepEngine");
  engine
      .def(
          py::init([](std::shared_ptr<zc::comm::Communicator> comm, zc::device::Device& device,
                      std::vector<zc::zero::ParamSpec> params, std::vector<zc::optim::Hyper> groups, int stage,
                      std::int64_t bucket_numel, int num_grad_buffers, zc::DType reduce_dtype,
                      zc::DType accumulate_dtype, bool share_parameters, std::vector<std::pair<std::string, int>> units,
                      std::int64_t max_live_numel, std::int64_t max_reuse_numel, std::int64_t prefetch_numel,
                      std::optional<zc::math::LossScaleRule> loss_scale) {
            zc::engine::Options options{stage,
                                        bucket_numel,
                                        num_grad_buffers,
                                        reduce_dtype,
                                        accumulate_dtype,
                                        share_parameters,
                                        {},
                                        {max_live_numel, max_reuse_numel, prefetch_numel},
                                        loss_scale};
            for (auto& [name, parent] : units) options.units.push_back({std::move(name), parent});
            return std::make_unique<StepEngine>(std::move(comm), device, std::move(params), std::move(groups), options);
          }),
          NoGil(), py::kw_only(), py::arg("comm"), py::arg("device"), py::arg("params"), py::arg("groups"),
          py::arg("stage"), py::arg("bucket_numel"), py::arg("num_grad_buffers"), py::arg("reduce_dtype"),
          py::arg("accumulate_dtype"), py::arg("share_parameters"), py::arg("units"), py::arg("max_live_numel"),
          py::arg("max_reuse_numel"), py::arg("prefetch_numel"), py::arg("loss_scale"))
      .def("allocate_states", static_cast<void (StepEngine::*)()>(&StepEngine::allocate_states), NoGil())
      .def("param_memory",
           [](const StepEngine& self, int param) {
             const StepEngine::ParamMemory at = self.param_memory(param);
             return py::make_tuple(PyMemory{at.memory, at.memory_bytes}, at.offset_bytes);
           })
      .def("load_param", &StepEngine::load_param, NoGil())
      .def("reload_master", &StepEngine::reload_master)
      .def("set_hold_bytes", [](StepEngine& self, std::int64_t bytes) { self.reducer().set_hold_bytes(bytes); })
      .def("begin_micro_step", [](StepEngine& self, bool has) { self.reducer().begin_micro_step(has); })
      .def("ready",
           [](StepEngine& self, int param, std::uintptr_t address, std::int64_t numel, zc::DType dtype,
              bool may_launch) {
             const zc::BufferView grad{reinterpret_cast<void*>(address), numel, dtype, self.device().id()};
             std::span<const int> launched;
             {
               py::gil_scoped_release unlocked;
               launched = self.reducer().ready(param, grad, may_launch);
             }
             return std::vector<int>(launched.begin(), launched.end());
           })
      .def(
          "end_micro_step", [](StepEngine& self) { return self.reducer().end_micro_step(); }, NoGil())
      .def("location",
           [](const StepEngine& self, int param) {
             const auto at = self.layout().location(param);
             return std::pair(at.bucket, at.offset);
           })
      .def("set_stream",
           [](StepEngine& self, std::uintptr_t stream) { self.set_stream({reinterpret_cast<void*>(stream)}); })
      .def("num_buckets", [](const StepEngine& self) { return self.layout().buckets().size(); })
      .def("read_state", &StepEngine::read_state, NoGil())
      .def("write_state", &StepEngine::write_state, NoGil())
      .def("owned_range",
           [](const StepEngine& self, int param, StateKind kind) {
             const auto range = self.owned_range(param, kind);
             return std::pair(range.begin, range.end);
           })
      .def("read_owned_state", &StepEngine::read_owned_state, NoGil())
      .def("write_owned_state", &StepEngine::write_owned_state, NoGil())
      .def(
          "step",
          [](StepEngine& self, const std::vector<zc::optim::Hyper>& groups, double divisor, double max_norm,
             std::uint32_t settings, bool stop, std::vector<double> weights, bool weights_missing) {
            self.step(groups, divisor, max_norm, settings, stop, {std::move(weights), weights_missing});
            return self.asked_to_stop();
          },
          NoGil(), py::arg("groups"), py::kw_only(), py::arg("divisor"), py::arg("max_norm"), py::arg("settings"),
          py::arg("stop"), py::arg("weights"), py::arg("weights_missing"))
      .def(
          "begin_foreign_step",
          [](StepEngine& self, double divisor, double max_norm, std::uint32_t settings, bool stop,
             std::vector<double> weights, bool weights_missing) {
            self.begin_foreign_step(divisor, max_norm, settings, stop, {std::move(weights), weights_missing});
            return self.asked_to_stop();
          },
          NoGil(), py::kw_only(), py::arg("divisor"), py::arg("max_norm"), py::arg("settings"), py::arg("stop"),
          py::arg("weights"), py::arg("weights_missing"))
      .def(
          "result", [](StepEngine& self) { return self.result(); }, NoGil())
      .def("end_foreign_step", &StepEngine::end_foreign_step, NoGil())
      .def("used_params",
           [](StepEngine& self) {
             const auto used = self.reducer().used();
             return std::vector<bool>(used.begin(), used.end());
           })
      .def("zero_grad", &StepEngine::zero_grad, NoGil())
      .def("memory_report", &StepEngine::memory_report)
      .def("most_while_running", &StepEngine::most_while_running);
  bind_loss_scale(m, engine);
  bind_checkpoint(engine);
  bind_gatherer(engine);
}
