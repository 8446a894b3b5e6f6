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

Optimizer::Optimizer(std::vector<Hyper> groups, std::vector<Slot> slots)
    : groups_(std::move(groups)),
      slots_(std::move(slots)),
      num_states_{optim::num_states(groups_, false), optim::num_states(groups_, true)},
      steps_(slots_.size(), 0),
      used_(slots_.size(), 1),
      adam_(slots_.size()),
      sgd_(slots_.size()),
      lion_(slots_.size()),
      adagrad_(slots_.size()),
      muon_(slots_.size()) {
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

void Optimizer::begin_step(std::span<const std::uint8_t> used) {
  ZC_CHECK(used.size() == used_.size(), kInternal, "[optim] ", used.size(), " used flags for ", used_.size(), " slots");
  std::copy(used.begin(), used.end(), used_.begin());
  all_used_ = std::all_of(used_.begin(), used_.end(), [](std::uint8_t flag) { return flag != 0; });
  for (std::size_t slot = 0; slot < used_.size(); ++slot) {
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
}

int Optimizer::newton_schulz_iterations(int slot) const {
  const auto group = static_cast<std::size_t>(slots_[static_cast<std::size_t>(slot)].group);
  return std::get<math::MuonHyper>(groups_[group]).iterations;
}

std::span<const device::Piece> Optimizer::used_pieces(std::span<const device::Piece> pieces) {
  if (all_used_) return pieces;
  used_pieces_.clear();
  std::copy_if(pieces.begin(), pieces.end(), std::back_inserter(used_pieces_),
               [&](const device::Piece& piece) { return used(piece.slot); });
  return used_pieces_;
}

void Optimizer::update(device::Kernels& kernels, std::span<const device::Piece> pieces, const math::StepScalars& step,
                       const device::OptimizerBuffers& buffers, device::Stream stream) {
  pieces = used_pieces(pieces);
  if (pieces.empty()) return;
  const Hyper& kind = groups_[static_cast<std::size_t>(slots_[static_cast<std::size_t>(pieces.front().slot)].group)];
  if (std::holds_alternative<math::AdamHyper>(kind)) {
    kernels.adam(pieces, adam_.data(), &step, buffers, stream);
  } else if (std::holds_alternative<math::SgdHyper>(kind)) {
    kernels.sgd(pieces, sgd_.data(), &step, buffers, stream);
  } else if (std::holds_alternative<math::LionHyper>(kind)) {
    kernels.lion(pieces, lion_.data(), &step, buffers, stream);
  } else if (std::holds_alternative<math::AdagradHyper>(kind)) {
    kernels.adagrad(pieces, adagrad_.data(), &step, buffers, stream);
  } else {
    kernels.muon(pieces, muon_.data(), &step, buffers, stream);
  }
}

void Optimizer::muon_momentum(device::Kernels& kernels, std::span<const device::Piece> pieces,
                              const math::StepScalars& step, const device::OptimizerBuffers& buffers,
                              device::Stream stream) {
  kernels.muon_momentum(used_pieces(pieces), muon_.data(), &step, buffers, stream);
}

}  // namespace zc::optim
