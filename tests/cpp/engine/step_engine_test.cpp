#include "zc/engine/step_engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "engine/training.h"

namespace zc::engine {
namespace {

using math::AdamHyper;
using math::SgdHyper;

// Trains and returns the parameters' bytes, which must be equal on all ranks.
std::vector<std::byte> train(const Setting& s) {
  std::vector<std::vector<std::byte>> results(static_cast<std::size_t>(s.num_ranks));
  test::run_ranks(s.num_ranks, [&](std::shared_ptr<comm::Communicator> comm) {
    const int rank = comm->rank();
    auto engine = make_engine(comm, s);
    const int micro_steps = (s.micro_batches + s.num_ranks - 1) / s.num_ranks;
    for (int step = 0; step < s.steps; ++step) {
      for (int k = 0; k < micro_steps; ++k) run_micro_step(*engine, s, rank, step, k);
      const StepResult result = stepped(*engine, std::vector<optim::Hyper>{s.hyper}, s.micro_batches, s.max_norm, 0);
      EXPECT_EQ(result.scalars.skip, 0u);
    }
    results[static_cast<std::size_t>(rank)] = params_of(*engine, s.dtype);
  });
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
  return results[0];
}

TEST(StepEngineTest, SameBitsForEveryStageNumberOfRanksAndBucketSize) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const optim::Hyper& hyper : {optim::Hyper{AdamHyper{.lr = 0.01, .weight_decay = 0.1}},
                                      optim::Hyper{SgdHyper{.lr = 0.1, .momentum = 0.9, .nesterov = true}}}) {
      Setting setting;
      setting.dtype = dtype;
      setting.hyper = hyper;
      const auto expected = train(setting);
      for (int num_ranks : {1, 2, 3, 4}) {
        for (int stage : {0, 1, 2, 3}) {
          for (std::int64_t bucket_numel : {1, 3000, 1 << 20}) {
            setting.num_ranks = num_ranks;
            setting.options = options_of(stage, bucket_numel);
            EXPECT_EQ(train(setting), expected)
                << name(dtype) << " ranks " << num_ranks << " stage " << stage << " bucket " << bucket_numel;
          }
        }
      }
    }
  }
}

TEST(StepEngineTest, SgdOnExactNumbersGivesTheMeanGradient) {
  for (int num_ranks : {1, 2, 3}) {
    test::run_ranks(num_ranks, [&](std::shared_ptr<comm::Communicator> comm) {
      StepEngine engine(comm, device::cpu_device(), {{"w", 2000, DType::kF32, 0}}, {SgdHyper{.lr = 0.5}},
                        {2, 1 << 20, 2});
      engine.allocate_states();
      std::vector<float> values(2000, 3.0f), grad(2000);
      engine.load_param(0, {values.data(), 2000, DType::kF32, {}});
      for (int k = 0; k < (4 + num_ranks - 1) / num_ranks; ++k) {
        const int j = k * num_ranks + comm->rank();
        std::fill(grad.begin(), grad.end(), static_cast<float>(j));  // 0 + 1 + 2 + 3 over four micro-batches: mean 1.5
        engine.reducer().begin_micro_step(j < 4);
        engine.reducer().ready(0, {grad.data(), 2000, DType::kF32, {}});
        engine.reducer().end_micro_step();
      }
      const StepResult result = stepped(engine, std::vector<optim::Hyper>{SgdHyper{.lr = 0.5}}, 4, 0, 0);
      EXPECT_EQ(result.scalars.grad_norm, std::sqrt(2000.0 * 36) / 4);
      const auto at = engine.param_memory(0);
      const float* param = reinterpret_cast<const float*>(at.memory.get() + at.offset_bytes);
      for (int i = 0; i < 2000; ++i) ASSERT_EQ(param[i], 3.0f - 0.5f * 1.5f);
    });
  }
}

TEST(StepEngineTest, ANonFiniteGradientOnOneRankSkipsTheStepOnAll) {
  for (int stage : {0, 2, 3}) {
    test::run_ranks(2, [&](std::shared_ptr<comm::Communicator> comm) {
      Setting setting;
      setting.num_ranks = 2;
      setting.options = options_of(stage);
      auto engine = make_engine(comm, setting);
      const auto before = params_of(*engine, DType::kF32);
      std::vector<float> grad = gradient(0, 0, 4);
      if (comm->rank() == 1) grad[1000] = std::numeric_limits<float>::infinity();
      engine->reducer().begin_micro_step(true);
      engine->reducer().ready(4, {grad.data(), kNumels[4], DType::kF32, {}});
      engine->reducer().end_micro_step();
      const StepResult result = stepped(*engine, std::vector<optim::Hyper>{setting.hyper}, 2, 1, 0);
      EXPECT_EQ(result.scalars.skip, 1u);
      EXPECT_EQ(result.nonfinite, std::vector<int>{4});
      EXPECT_EQ(params_of(*engine, DType::kF32), before);
      for (std::int64_t steps : engine->param_steps()) EXPECT_EQ(steps, 0);
      // Nothing of it is left: a step of zero gradients over unused parameters moves nothing.
      engine->reducer().begin_micro_step(true);
      engine->reducer().end_micro_step();
      EXPECT_EQ(stepped(*engine, std::vector<optim::Hyper>{setting.hyper}, 2, 1, 0).scalars.grad_norm, 0);
      EXPECT_EQ(params_of(*engine, DType::kF32), before);
    });
  }
}

TEST(StepEngineTest, RanksThatStepWithOtherSettingsAreToldAndNothingIsUpdated) {
  for (int differing : {0, 1, 2, 3}) {
    EXPECT_THROW(test::run_ranks(3,
                                 [&](std::shared_ptr<comm::Communicator> comm) {
                                   Setting setting;
                                   setting.num_ranks = 3;
                                   setting.options = {differing % 3, 1 << 20, 2};
                                   auto engine = make_engine(comm, setting);
                                   const auto before = params_of(*engine, DType::kF32);
                                   run_micro_step(*engine, setting, comm->rank(), 0, 0);
                                   const bool other = comm->rank() == 1;
                                   const AdamHyper hyper{.lr = differing == 0 && other ? 0.1 : 0.2};
                                   EXPECT_THROW(
                                       engine->step(std::vector<optim::Hyper>{hyper}, differing == 1 && other ? 2 : 3,
                                                    differing == 2 && other ? 0.5 : 0, differing == 3 && other),
                                       Error);
                                   EXPECT_EQ(params_of(*engine, DType::kF32), before);
                                   throw Error(ErrorKind::kInternal, "reached the end");
                                 }),
                 Error);
  }
}

// The first momentum of a parameter must not move it again in a step in which nobody used it.
TEST(StepEngineTest, UsageIsForgottenAfterAStep) {
  test::run_ranks(2, [](std::shared_ptr<comm::Communicator> comm) {
    Setting setting;
    setting.num_ranks = 2;
    setting.options = {2, 1 << 20, 2};
    auto engine = make_engine(comm, setting);
    run_micro_step(*engine, setting, comm->rank(), 0, 0);
    engine->step(std::vector<optim::Hyper>{setting.hyper}, 2, 0, 0);
    const auto before = params_of(*engine, DType::kF32);
    engine->reducer().begin_micro_step(true);
    engine->reducer().end_micro_step();
    engine->step(std::vector<optim::Hyper>{setting.hyper}, 2, 0, 0);
    EXPECT_EQ(params_of(*engine, DType::kF32), before);
    for (std::int64_t steps : engine->param_steps()) EXPECT_EQ(steps, 1);
  });
}

// What a reduction in flight reads and writes outlives the engine. (AddressSanitizer tells.)
TEST(StepEngineTest, AnEngineMayGoWhileItsReductionsAreInFlight) {
  test::run_ranks(2, [](std::shared_ptr<comm::Communicator> comm) {
    Setting setting;
    setting.num_ranks = 2;
    setting.options = {2, 1 << 20, 2};
    {
      auto engine = make_engine(comm, setting);
      run_micro_step(*engine, setting, comm->rank(), 0, 0);
      if (comm->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // rank 0 waits for this one
      engine->reducer().begin_micro_step(true);
      std::vector<std::vector<float>> grads;
      for (int p = kNumParams - 1; p >= 0; --p) {
        grads.push_back(gradient(0, 0, p));
        engine->reducer().ready(p, {grads.back().data(), kNumels[p], DType::kF32, {}});
      }
    }
    comm->barrier("the reductions are over").wait();
  });
}

TEST(StepEngineTest, MemoryFollowsTheFormulas) {
  constexpr std::int64_t kPsi = 8 * 1024 * 4;
  for (int num_ranks : {1, 2, 4}) {
    for (int stage : {0, 1, 2, 3}) {
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        test::run_ranks(num_ranks, [&](std::shared_ptr<comm::Communicator> comm) {
          const bool sharded = stage == 3;
          StepEngine engine(
              comm, device::cpu_device(),
              {{.name = "w", .numel = kPsi, .dtype = dtype, .unit = 0, .compute_dtype = dtype, .sharded = sharded},
               {.name = "frozen", .numel = kPsi, .dtype = dtype, .unit = 0, .sharded = sharded, .trainable = false}},
              {AdamHyper{}}, {.stage = stage, .bucket_numel = 1 << 20, .units = {{"unit"}}});
          engine.allocate_states();
          const auto report = engine.memory_report();
          const std::int64_t n = stage == 0 ? 1 : num_ranks;
          EXPECT_EQ(report.at("parameters"), kPsi * size_bytes(dtype) / (sharded ? n : 1));
          EXPECT_EQ(report.at("frozen_parameters"), kPsi * size_bytes(dtype) / (sharded ? n : 1));
          EXPECT_EQ(report.at("gradient_accumulator"), 4 * kPsi / n);
          EXPECT_EQ(report.at("optimizer_state"), 8 * kPsi / n);
          EXPECT_EQ(report.at("master_weights"), dtype == DType::kF32 ? 0 : 4 * kPsi / n);
        });
      }
    }
  }
}

// Elements a step at accumulation 1: gradients in and parameters out, which stage 3 gathers twice.
TEST(StepEngineTest, TrafficIsTwoOrThreePsi) {
  constexpr std::int64_t kPsi = 8 * 1024 * 4;
  for (int stage : {1, 2, 3}) {
    test::run_ranks(4, [&](std::shared_ptr<comm::Communicator> comm) {
      StepEngine engine(comm, device::cpu_device(),
                        {{.name = "w", .numel = kPsi, .unit = stage == 3 ? 0 : -1, .sharded = stage == 3}},
                        {AdamHyper{}},
                        {.stage = stage, .units = {{"unit"}}, .limits = {.max_reuse_numel = 0, .prefetch_numel = 0}});
      engine.allocate_states();
      const auto elements = [](const comm::Communicator& group, comm::Op op) {
        return group.counters()[static_cast<std::size_t>(op)].elements;
      };
      std::vector<float> grad(kPsi, 1.0f);
      engine.reducer().begin_micro_step(true);
      for (int pass = 0; stage == 3 && pass < 2; ++pass) gather(engine, 0, true);
      engine.reducer().ready(0, {grad.data(), kPsi, DType::kF32, {}});
      engine.reducer().end_micro_step();
      engine.step(std::vector<optim::Hyper>{AdamHyper{}}, 4, 0, 0);
      EXPECT_EQ(elements(*comm, comm::Op::kReduceScatterAdd), kPsi);
      EXPECT_EQ(elements(*comm, comm::Op::kAllGather), stage == 3 ? 0 : kPsi);
      EXPECT_EQ(elements(*engine.gather_comm(), comm::Op::kAllGather), stage == 3 ? 2 * kPsi : 0);
    });
  }
}

// --- Frozen parameters

// They keep their bits, in the dtype they came in, and change nothing about the others'.
TEST(StepEngineTest, FrozenParametersStayAsTheyWereLoaded) {
  constexpr std::int64_t kNumel = 3000;
  std::vector<std::byte> expected;
  for (bool with_frozen : {false, true}) {
    for (int num_ranks : {1, 2, 3}) {
      for (bool sharded : {false, true}) {
        std::vector<std::vector<std::byte>> results(static_cast<std::size_t>(num_ranks));
        test::run_ranks(num_ranks, [&](std::shared_ptr<comm::Communicator> comm) {
          std::vector<zero::ParamSpec> params{{.name = "w", .numel = kNumel, .unit = 0, .sharded = sharded}};
          if (with_frozen) {
            zero::ParamSpec frozen{.name = "frozen",
                                   .numel = kNumel,
                                   .dtype = DType::kBF16,
                                   .unit = 0,
                                   .sharded = sharded,
                                   .trainable = false};
            params.insert(params.begin(), frozen);
          }
          StepEngine engine(comm, device::cpu_device(), params, {AdamHyper{.lr = 0.1}},
                            {.stage = sharded ? 3 : 2, .units = {{"unit"}}, .limits = {.max_reuse_numel = 0}});
          const int trained = with_frozen ? 1 : 0;
          auto values = gradient(0, 0, 1);
          auto kept = in_dtype(values, DType::kBF16);
          if (comm->rank() != 0) std::fill(kept.begin(), kept.end(), std::byte{1});
          engine.load_param(trained, {values.data(), kNumel, DType::kF32, {}});
          if (with_frozen) engine.load_param(0, {kept.data(), kNumel, DType::kBF16, {}});
          engine.allocate_states();
          std::vector<float> grad(kNumel, 1.0f);
          for (int step = 0; step < 2; ++step) {
            engine.reducer().begin_micro_step(comm->rank() == 0);
            engine.reducer().ready(trained, {grad.data(), kNumel, DType::kF32, {}});
            engine.reducer().end_micro_step();
            engine.step(std::vector<optim::Hyper>{AdamHyper{.lr = 0.1}}, 1, 1, 0);
            engine.zero_grad();
          }
          auto full = gather(engine, 0, false);
          const auto w = engine.layout().location(trained);
          const std::byte* begin = full[w.bucket].data() + w.offset * 4;
          results[static_cast<std::size_t>(comm->rank())].assign(begin, begin + kNumel * 4);
          if (!with_frozen) return;
          std::vector<float> widened(kNumel);
          device::cpu_kernels().cast({kept.data(), kNumel, DType::kBF16, {}}, {widened.data(), kNumel, DType::kF32, {}},
                                     {});
          const auto& whole = full[engine.layout().location(0).bucket];
          EXPECT_EQ(std::memcmp(whole.data(), widened.data(), kNumel * 4), 0);
        });
        if (expected.empty()) expected = results[0];
        for (const auto& result : results) EXPECT_EQ(result, expected);
      }
    }
  }
}

TEST(StepEngineTest, RejectsAStageItDoesNotHave) {
  test::run_ranks(1, [&](std::shared_ptr<comm::Communicator> comm) {
    EXPECT_THROW(StepEngine(comm, device::cpu_device(), specs(DType::kF32), {AdamHyper{}}, {.stage = 4}), Error);
  });
}

}  // namespace
}  // namespace zc::engine
