#include "zc/optim/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "zc/base/error.h"

namespace zc::optim {
namespace {

using math::AdamHyper;
using math::SgdHyper;

const math::StepScalars kStep;
const math::StepScalars kHalf{.factor = 0.5f};

TEST(OptimizerTest, CountsStatesOfAllGroups) {
  EXPECT_EQ(num_states(std::vector<Hyper>{AdamHyper{}}), 2);
  EXPECT_EQ(num_states(std::vector<Hyper>{SgdHyper{}}), 0);
  EXPECT_EQ(num_states(std::vector<Hyper>{SgdHyper{}, SgdHyper{.momentum = 0.5}}), 1);
  EXPECT_EQ(num_states(std::vector<Hyper>{math::LionHyper{}}), 1);
  EXPECT_EQ(num_states(std::vector<Hyper>{math::AdagradHyper{}}), 1);
}

TEST(OptimizerTest, SgdUpdatesEachPieceWithItsGroup) {
  Optimizer optimizer(device::cpu_device(), {SgdHyper{.lr = 0.5}, SgdHyper{.lr = 2.0}}, {{0}, {1}});
  std::vector<float> grad = {1, 1, 1, 1}, param = {8, 8, 8, 8};
  const std::vector<device::Piece> pieces = {{0, 2, 0}, {2, 2, 1}};
  const std::uint8_t used[] = {1, 1};
  optimizer.begin_step(used, {});
  optimizer.update(pieces, &kHalf, {.grad = grad.data(), .param = param.data()}, {});
  EXPECT_EQ(param, (std::vector<float>{7.75f, 7.75f, 7, 7}));
  EXPECT_EQ(grad, (std::vector<float>{1, 1, 1, 1}));
}

TEST(OptimizerTest, AnUnusedParameterIsLeftAloneAndItsCountStands) {
  Optimizer optimizer(device::cpu_device(), {SgdHyper{.lr = 1, .weight_decay = 0.5}}, {{0}, {0}});
  std::vector<float> grad = {0, 0}, param = {8, 8};
  const std::vector<device::Piece> pieces = {{0, 1, 0}, {1, 1, 1}};
  const std::uint8_t used[] = {1, 0};
  optimizer.begin_step(used, {});
  optimizer.update(pieces, &kStep, {.grad = grad.data(), .param = param.data()}, {});
  EXPECT_EQ(param, (std::vector<float>{4, 8}));
  EXPECT_EQ(optimizer.steps()[0], 1);
  EXPECT_EQ(optimizer.steps()[1], 0);
  const std::uint8_t both[] = {1, 1};
  optimizer.begin_step(both, {});
  optimizer.update(pieces, &kStep, {.grad = grad.data(), .param = param.data()}, {});
  EXPECT_EQ(param, (std::vector<float>{2, 4}));
}

TEST(OptimizerTest, BiasCorrectionFollowsEachParametersOwnCount) {
  // The first Adam update moves a parameter by lr against its gradient's sign, however late it comes (eps 0).
  Optimizer optimizer(device::cpu_device(), {AdamHyper{.lr = 0.25, .eps = 0}}, {{0}, {0}});
  std::vector<float> grad = {2, 2}, param = {1, 1}, m(2), v(2);
  const std::vector<device::Piece> pieces = {{0, 1, 0}, {1, 1, 1}};
  const device::OptimizerBuffers buffers{
      .grad = grad.data(), .param = param.data(), .state1 = m.data(), .state2 = v.data()};
  const std::uint8_t first[] = {1, 0}, second[] = {0, 1};
  optimizer.begin_step(first, {});
  optimizer.update(pieces, &kStep, buffers, {});
  EXPECT_NEAR(param[0], 0.75, 1e-6);
  EXPECT_EQ(param[1], 1);
  optimizer.begin_step(second, {});
  optimizer.update(pieces, &kStep, buffers, {});
  EXPECT_EQ(param[1], param[0]);
}

TEST(OptimizerTest, AdagradStartsAtEachParametersFirstStep) {
  Optimizer optimizer(device::cpu_device(),
                      {math::AdagradHyper{.lr = 1, .lr_decay = 1, .eps = 0, .initial_accumulator = 3}}, {{0}, {0}});
  std::vector<float> grad = {1, 1}, param = {8, 8}, sum = {100, 100};
  const std::vector<device::Piece> pieces = {{0, 1, 0}, {1, 1, 1}};
  const device::OptimizerBuffers buffers{.grad = grad.data(), .param = param.data(), .state1 = sum.data()};
  const std::uint8_t first[] = {1, 0}, both[] = {1, 1};
  optimizer.begin_step(first, {});
  optimizer.update(pieces, &kStep, buffers, {});
  EXPECT_EQ(param, (std::vector<float>{7.5f, 8}));
  EXPECT_EQ(sum, (std::vector<float>{4, 100}));
  optimizer.begin_step(both, {});
  optimizer.update(pieces, &kStep, buffers, {});
  EXPECT_EQ(param[1], 7.5f);
  EXPECT_NEAR(param[0], 7.5 - 0.5 / std::sqrt(5.0), 1e-6);
  EXPECT_EQ(sum, (std::vector<float>{5, 4}));
}

TEST(OptimizerTest, MuonHasMatricesAndAdamTheOthers) {
  const std::vector<Hyper> groups{math::MuonHyper{.lr = 0.5, .momentum = 0.5, .nesterov = false}, AdamHyper{}};
  EXPECT_EQ(num_states(groups, true), 1);
  EXPECT_EQ(num_states(groups, false), 2);
  EXPECT_THROW(Optimizer(device::cpu_device(), groups, {{0}}), Error);              // no matrix
  EXPECT_THROW(Optimizer(device::cpu_device(), groups, {{1, 1.0}}), Error);         // no Muon
  EXPECT_NO_THROW(Optimizer(device::cpu_device(), groups, {{-1}, {1}, {0, 1.0}}));  // the first is not trained
  EXPECT_THROW(Optimizer(device::cpu_device(), {math::MuonHyper{}, SgdHyper{}}, {{1}}), Error);

  Optimizer optimizer(device::cpu_device(), groups, {{0, 4.0}, {0, 0.25}});
  std::vector<float> grad = {2, 4}, param = {8, 8}, momentum = {0, 0}, direction = {9, 9};
  const device::OptimizerBuffers buffers{
      .grad = grad.data(), .param = param.data(), .state1 = momentum.data(), .direction = direction.data()};
  const std::vector<device::Piece> pieces = {{0, 1, 0}, {1, 1, 1}};
  const std::uint8_t both[] = {1, 1}, second[] = {0, 1};
  optimizer.begin_step(both, {});
  optimizer.muon_momentum(pieces, &kStep, buffers, {});
  EXPECT_EQ(direction, (std::vector<float>{1, 2}));
  EXPECT_EQ(momentum, direction);
  optimizer.update(pieces, &kStep, buffers, {});
  EXPECT_EQ(param, (std::vector<float>{7, 7}));  // the first is tall: twice its rate
  optimizer.begin_step(second, {});
  optimizer.muon_momentum(pieces, &kStep, buffers, {});
  EXPECT_EQ(momentum, (std::vector<float>{1, 3}));
  EXPECT_FALSE(optimizer.used(0));
}

TEST(OptimizerTest, HyperparametersMayChangeTheKindMayNot) {
  Optimizer optimizer(device::cpu_device(), {SgdHyper{.lr = 1}}, {{0}});
  EXPECT_NO_THROW(optimizer.set_groups(std::vector<Hyper>{SgdHyper{.lr = 2}}));
  EXPECT_THROW(optimizer.set_groups(std::vector<Hyper>{AdamHyper{}}), Error);
  EXPECT_THROW(optimizer.set_groups(std::vector<Hyper>{SgdHyper{}, SgdHyper{}}), Error);
  EXPECT_THROW(optimizer.set_groups(std::vector<Hyper>{SgdHyper{.momentum = 0.9}}), Error);
}

}  // namespace
}  // namespace zc::optim
