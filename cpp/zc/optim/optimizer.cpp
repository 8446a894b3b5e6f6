#include "zc/optim/optimizer.h"

#include <algorithm>

#include "zc/base/error.h"

namespace zc::optim {

int num_states(std::span<const Hyper> groups) {
  int states = 0;
  for (const Hyper& hyper : groups) {
    if (std::holds_alternative<math::AdamHyper>(hyper)) return 2;
    if (std::get<math::SgdHyper>(hyper).momentum != 0) states = 1;
  }
  return states;
}

Optimizer::Optimizer(std::vector<Hyper> groups, std::vector<int> group_of)
    : groups_(std::move(groups)),
      group_of_(std::move(group_of)),
      num_states_(optim::num_states(groups_)),
      steps_(group_of_.size(), 0),
      used_(group_of_.size(), 1),
      adam_(group_of_.size()),
      sgd_(group_of_.size()) {
  for (const Hyper& hyper : groups_) {
    ZC_CHECK(hyper.index() == groups_.front().index(), kInternal, "[optim] parameter groups of two optimizers");
  }
  for (int group : group_of_) {
    ZC_CHECK(group >= 0 && group < static_cast<int>(groups_.size()), kInternal, "[optim] parameter group ", group,
             " of ", groups_.size());
  }
}

void Optimizer::set_groups(std::span<const Hyper> groups) {
  ZC_CHECK(groups.size() == groups_.size(), kConfig, "[optim] the number of parameter groups changed: got ",
           groups.size(), ", expected ", groups_.size(), ". Build a new engine to add groups.");
  for (std::size_t i = 0; i < groups.size(); ++i) {
    ZC_CHECK(groups[i].index() == groups_[i].index(), kInternal, "[optim] group ", i, " changed its optimizer");
  }
  ZC_CHECK(optim::num_states(groups) <= num_states_, kConfig,
           "[optim] momentum was switched on after the engine was built without: got ", optim::num_states(groups),
           " states a parameter, expected ", num_states_, ". Set momentum when building the engine.");
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
    const Hyper& hyper = groups_[static_cast<std::size_t>(group_of_[slot])];
    if (const auto* adam = std::get_if<math::AdamHyper>(&hyper)) {
      adam_[slot] = math::adam_scalars(*adam, step);
    } else {
      sgd_[slot] = math::sgd_scalars(std::get<math::SgdHyper>(hyper), step);
    }
  }
}

void Optimizer::update(device::Kernels& kernels, std::span<const device::Piece> pieces, const math::StepScalars& step,
                       const device::OptimizerBuffers& buffers, device::Stream stream) {
  if (!all_used_) {
    used_pieces_.clear();
    std::copy_if(pieces.begin(), pieces.end(), std::back_inserter(used_pieces_),
                 [&](const device::Piece& piece) { return used_[static_cast<std::size_t>(piece.slot)] != 0; });
    pieces = used_pieces_;
  }
  if (std::holds_alternative<math::AdamHyper>(groups_.front())) {
    kernels.adam(pieces, adam_.data(), &step, buffers, stream);
  } else {
    kernels.sgd(pieces, sgd_.data(), &step, buffers, stream);
  }
}

}  // namespace zc::optim
