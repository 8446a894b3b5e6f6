#include <pybind11/stl.h>

#include "bindings.h"
#include "memory.h"
#include "zc/comm/topology.h"
#include "zc/engine/reductions.h"
#include "zc/engine/step_engine.h"
#include "zc/math/loss_scale.h"

namespace py = pybind11;
using zc::engine::StepEngine;
using NoGil = py::call_guard<py::gil_scoped_release>;

namespace {

void bind_optimizers(py::module_& m) {
  using zc::math::AdamHyper;
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
}

// The loss-scale rule with its state.
struct LossScaler {
  zc::math::LossScaleRule rule;
  zc::math::LossScaleState state;
};

void bind_loss_scaler(py::module_& m) {
  py::class_<LossScaler>(m, "LossScaler", "Static or dynamic loss scale; the rule is zc/math/loss_scale.h's.")
      .def(py::init([](bool dynamic, double initial_scale, std::int64_t window, std::int64_t hysteresis,
                       bool consecutive_hysteresis, double min_scale) {
             const zc::math::LossScaleRule rule{dynamic,    initial_scale,          window,
                                                hysteresis, consecutive_hysteresis, min_scale};
             return LossScaler{rule, zc::math::initial_loss_scale(rule)};
           }),
           py::kw_only(), py::arg("dynamic"), py::arg("initial_scale"), py::arg("window"), py::arg("hysteresis"),
           py::arg("consecutive_hysteresis"), py::arg("min_scale"))
      .def_property_readonly("scale", [](const LossScaler& self) { return self.state.scale; })
      .def(
          "update", [](LossScaler& self, bool overflow) { return zc::math::update(self.rule, self.state, overflow); },
          "Moves past one step. False: an overflow at the minimum scale.");
}

}  // namespace

void bind_engine(py::module_& m) {
  bind_optimizers(m);
  bind_loss_scaler(m);

  m.def(
      "shard_group",
      [](zc::comm::Communicator& world) {
        return zc::comm::Topology{.dp = world.size()}.make_group(world, zc::comm::Role::kShard);
      },
      NoGil(), "The ranks over which this rank's model states are sharded. Collective.");
  m.def("exact_mean", &zc::engine::exact_mean, NoGil(), py::arg("comm"), py::arg("value"), py::arg("counts"),
        "The mean over the ranks that count, exact and rounded once. Collective.");

  py::class_<zc::zero::ParamSpec>(m, "ParamSpec")
      .def(py::init([](std::string name, std::int64_t numel, zc::DType dtype, int group) {
             return zc::zero::ParamSpec{std::move(name), numel, dtype, group};
           }),
           py::arg("name"), py::arg("numel"), py::arg("dtype"), py::arg("group"));

  py::class_<zc::engine::StepResult>(m, "StepResult")
      .def_property_readonly("skipped", [](const zc::engine::StepResult& r) { return r.scalars.skip != 0; })
      .def_property_readonly("grad_norm", [](const zc::engine::StepResult& r) { return r.scalars.grad_norm; })
      .def_property_readonly("clip", [](const zc::engine::StepResult& r) { return r.scalars.clip; })
      .def_readonly("nonfinite", &zc::engine::StepResult::nonfinite);

  py::class_<StepEngine>(m, "StepEngine")
      .def(py::init([](std::shared_ptr<zc::comm::Communicator> comm, std::vector<zc::zero::ParamSpec> params,
                       std::vector<zc::optim::Hyper> groups, int stage, std::int64_t bucket_numel,
                       int num_grad_buffers) {
             return std::make_unique<StepEngine>(std::move(comm), zc::device::cpu_device(), std::move(params),
                                                 std::move(groups),
                                                 zc::engine::Options{stage, bucket_numel, num_grad_buffers});
           }),
           py::kw_only(), py::arg("comm"), py::arg("params"), py::arg("groups"), py::arg("stage"),
           py::arg("bucket_numel"), py::arg("num_grad_buffers"))
      .def("param_memory",
           [](const StepEngine& self, int param) {
             const StepEngine::ParamMemory at = self.param_memory(param);
             return py::make_tuple(PyMemory{at.memory, at.memory_bytes}, at.offset_bytes);
           })
      .def("load_param", &StepEngine::load_param, NoGil())
      .def("reload_master", &StepEngine::reload_master)
      .def("begin_micro_step", [](StepEngine& self, bool has) { self.reducer().begin_micro_step(has); })
      .def("ready",
           [](StepEngine& self, int param, std::uintptr_t address, std::int64_t numel, zc::DType dtype,
              bool may_launch) {
             const zc::BufferView grad{reinterpret_cast<void*>(address), numel, dtype, {}};
             std::span<const int> launched;
             {
               py::gil_scoped_release unlocked;
               launched = self.reducer().ready(param, grad, may_launch);
             }
             return std::vector<int>(launched.begin(), launched.end());
           })
      .def(
          "end_micro_step", [](StepEngine& self) { return self.reducer().end_micro_step(); }, NoGil())
      .def("bucket_of", &StepEngine::bucket_of)
      .def("num_buckets", &StepEngine::num_buckets)
      .def(
          "step",
          [](StepEngine& self, const std::vector<zc::optim::Hyper>& groups, double divisor, double max_norm,
             std::uint32_t settings) { return self.step(groups, divisor, max_norm, settings); },
          NoGil())
      .def("zero_grad", &StepEngine::zero_grad, NoGil())
      .def("memory_report", &StepEngine::memory_report);
}
