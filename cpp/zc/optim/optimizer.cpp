#include "zc/optim/optimizer.h"

#include <algorithm>

#include "zc/base/error.h"

namespace zc::optim {

namespace {

bool is_muon(const Hyper& hyper) { return std::holds_alternative<math::MuonHyper>(hyper); }

int states_of(const Hyper& hyper) {
  if (std::holds_alternative<math::AdamHyper>(hyper)) return 2;
  if (std::holds_alternative<math::ForeignHyper>(hyper)) return 0;
  const auto* sgd = std::get_if<math::SgdHyper>(&hyper);
  return sgd != nullptr && sgd->momentum == 0 ? 0 : 1;
}

std::vector<double> values_of(const math::AdamHyper& h) {
  return {h.lr,
          h.beta1,
          h.beta2,
          h.eps,
          h.weight_decay,
          h.decoupled_weight_decay ? 1.0 : 0.0,
          h.bias_correction ? 1.0 : 0.0};
}
std::vector<double> values_of(const math::SgdHyper& h) {
  return {h.lr, h.momentum, h.dampening, h.weight_decay, h.nesterov ? 1.0 : 0.0};
}
std::vector<double> values_of(const math::LionHyper& h) { return {h.lr, h.beta1, h.beta2, h.weight_decay}; }
std::vector<double> values_of(const math::AdagradHyper& h) {
  return {h.lr, h.lr_decay, h.eps, h.weight_decay, h.initial_accumulator};
}
std::vector<double> values_of(const math::MuonHyper& h) {
  return {h.lr, h.momentum, h.weight_decay, h.nesterov ? 1.0 : 0.0, static_cast<double>(h.iterations)};
}
std::vector<double> values_of(const math::ForeignHyper&) { return {}; }

}  // namespace

int num_states(std::span<const Hyper> groups, bool matrices) {
  int states = 0;
  for (const Hyper& hyper : groups) {
    if (is_muon(hyper) == matrices) states = std::max(states, states_of(hyper));
  }
  return states;
}

std::vector<double> values(const Hyper& hyper) {
  return std::visit([](const auto& h) { return values_of(h); }, hyper);
}

Optimizer::Optimizer(device::Device& device, std::vector<Hyper> groups, std::vector<Slot> slots)
    : device_(device),
      groups_(std::move(groups)),
      slots_(std::move(slots)),
      num_states_{optim::num_states(groups_, false), optim::num_states(groups_, true)},
      steps_(slots_.size(), 0),
      used_(slots_.size(), 1) {
  const bool any_muon = std::ranges::any_of(groups_, is_muon);
  for (const Hyper& hyper : groups_) {
    const bool fits = any_muon ? is_muon(hyper) || std::holds_alternative<math::AdamHyper>(hyper)
                               : hyper.index() == groups_.front().index();
    ZC_CHECK(fits, kInternal, "[optim] parameter groups of two optimizers");
  }
  for (const Slot& slot : slots_) {
    if (slot.group == -1) continue;
    ZC_CHECK(slot.group >= 0 && slot.group < static_cast<int>(groups_.size()), kInternal, "[optim] parameter group ",
             slot.group, " of ", groups_.size());
    ZC_CHECK(is_muon(groups_[static_cast<std::size_t>(slot.group)]) == (slot.rows_by_columns > 0), kInternal,
             "[optim] Muon updates matrices, and nothing else does");
  }
  const auto allocate = [&]<class Kind>(auto& table) {
    const auto is_kind = [](const Hyper& hyper) { return std::holds_alternative<Kind>(hyper); };
    if (std::ranges::any_of(groups_, is_kind)) table.allocate(device_, slots_.size());
  };
  allocate.operator()<math::AdamHyper>(adam_);
  allocate.operator()<math::SgdHyper>(sgd_);
  allocate.operator()<math::LionHyper>(lion_);
  allocate.operator()<math::AdagradHyper>(adagrad_);
  allocate.operator()<math::MuonHyper>(muon_);
  used_there_.allocate(device_, slots_.size());
}

void Optimizer::set_groups(std::span<const Hyper> groups) {
  ZC_CHECK(groups.size() == groups_.size(), kConfig, "[optim] the number of parameter groups changed: got ",
           groups.size(), ", expected ", groups_.size(), ". Build a new engine to add groups.");
  for (std::size_t i = 0; i < groups.size(); ++i) {
    ZC_CHECK(groups[i].index() == groups_[i].index(), kInternal, "[optim] group ", i, " changed its optimizer");
  }
  ZC_CHECK(optim::num_states(groups) <= num_states_[0], kConfig,
           "[optim] momentum was switched on after the engine was built without: got ", optim::num_states(groups),
           " states a parameter, expected ", num_states_[0], ". Set momentum when building the engine.");
  std::copy(groups.begin(), groups.end(), groups_.begin());
}

void Optimizer::set_steps(std::span<const std::int64_t> steps) {
  ZC_CHECK(steps.size() == steps_.size(), kInternal, "[optim] ", steps.size(), " step counts for ", steps_.size(),
           " slots");
  std::copy(steps.begin(), steps.end(), steps_.begin());
}

void Optimizer::begin_step(std::span<const std::uint8_t> used, device::Stream stream) {
  ZC_CHECK(used.size() == used_.size(), kInternal, "[optim] ", used.size(), " used flags for ", used_.size(), " slots");
  std::copy(used.begin(), used.end(), used_.begin());
  const auto all_tables = [&](const auto& body) {
    body(used_there_), body(adam_), body(sgd_), body(lion_), body(adagrad_), body(muon_);
  };
  all_tables([](auto& table) { table.begin(); });
  for (std::size_t slot = 0; slot < used_.size(); ++slot) {
    used_there_[slot] = used_[slot];
    if (!used_[slot]) continue;
    const std::int64_t step = ++steps_[slot];
    const Hyper& hyper = groups_[static_cast<std::size_t>(slots_[slot].group)];
    if (const auto* adam = std::get_if<math::AdamHyper>(&hyper)) {
      adam_[slot] = math::adam_scalars(*adam, step);
    } else if (const auto* sgd = std::get_if<math::SgdHyper>(&hyper)) {
      sgd_[slot] = math::sgd_scalars(*sgd, step);
    } else if (const auto* lion = std::get_if<math::LionHyper>(&hyper)) {
      lion_[slot] = math::lion_scalars(*lion);
    } else if (const auto* adagrad = std::get_if<math::AdagradHyper>(&hyper)) {
      adagrad_[slot] = math::adagrad_scalars(*adagrad, step);
    } else if (const auto* muon = std::get_if<math::MuonHyper>(&hyper)) {
      muon_[slot] = math::muon_scalars(*muon, slots_[slot].rows_by_columns);
    }
  }
  all_tables([&](auto& table) { table.send(stream); });
}

void Optimizer::undo_step() {
  for (std::size_t slot = 0; slot < used_.size(); ++slot) {
    if (used_[slot]) --steps_[slot];
  }
}

int Optimizer::newton_schulz_iterations(int slot) const {
  const auto group = static_cast<std::size_t>(slots_[static_cast<std::size_t>(slot)].group);
  return std::get<math::MuonHyper>(groups_[group]).iterations;
}

void Optimizer::update(const device::Pieces& pieces, const math::StepScalars* step,
                       const device::OptimizerBuffers& buffers, device::Stream stream) {
  if (pieces.list.empty()) return;
  device::Kernels& kernels = device_.kernels();
  const std::uint8_t* used = used_there_.there();
  const Slot& first = slots_[static_cast<std::size_t>(pieces.list.front().slot)];
  const Hyper& kind = groups_[static_cast<std::size_t>(first.group)];
  if (std::holds_alternative<math::AdamHyper>(kind)) {
    kernels.adam(pieces, adam_.there(), used, step, buffers, stream);
  } else if (std::holds_alternative<math::SgdHyper>(kind)) {
    kernels.sgd(pieces, sgd_.there(), used, step, buffers, stream);
  } else if (std::holds_alternative<math::LionHyper>(kind)) {
    kernels.lion(pieces, lion_.there(), used, step, buffers, stream);
  } else if (std::holds_alternative<math::AdagradHyper>(kind)) {
    kernels.adagrad(pieces, adagrad_.there(), used, step, buffers, stream);
  } else {
    kernels.muon(pieces, muon_.there(), used, step, buffers, stream);
  }
}

void Optimizer::muon_momentum(const device::Pieces& pieces, const math::StepScalars* step,
                              const device::OptimizerBuffers& buffers, device::Stream stream) {
  device_.kernels().muon_momentum(pieces, muon_.there(), used_there_.there(), step, buffers, stream);
}

}  // namespace zc::optim
