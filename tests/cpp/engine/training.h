// A small model of all kinds of parameters, whose gradients are given: what the tests of the engine train.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/ranks.h"
#include "zc/engine/step_engine.h"

namespace zc::engine {

inline constexpr std::int64_t kNumels[] = {5, 3000, 0, 1, 1024, 65, 2500};

struct Setting {
  int num_ranks = 1;
  Options options;
  int micro_batches = 6;
  DType dtype = DType::kF32;
  optim::Hyper hyper = math::AdamHyper{.lr = 0.01, .weight_decay = 0.1};
  double max_norm = 0.5;
  int steps = 3;
};

// The gradient of one micro-batch: the same numbers whichever rank computes them. Parameter 3 is unused in odd
// micro-batches.
inline std::vector<float> gradient(int step, int micro_batch, int param) {
  std::mt19937 random(static_cast<unsigned>(step * 1000003 + micro_batch * 1009 + param));
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<std::size_t>(kNumels[param]));
  for (float& value : out) value = normal(random);
  return out;
}

inline std::vector<std::byte> in_dtype(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> out(values.size() * static_cast<std::size_t>(size_bytes(dtype)));
  device::cpu_kernels().cast(
      {const_cast<float*>(values.data()), static_cast<std::int64_t>(values.size()), DType::kF32, {}},
      {out.data(), static_cast<std::int64_t>(values.size()), dtype, {}}, {});
  return out;
}

inline constexpr int kNumParams = static_cast<int>(std::size(kNumels));

// In stage 3, parameters of all kinds: sharded ones in three units, one that is gathered but kept whole, and two that
// are used where they lie.
inline std::vector<zero::ParamSpec> specs(DType dtype, int stage = 0) {
  constexpr int kUnits[] = {-1, 0, 0, 1, 1, -1, 2};
  std::vector<zero::ParamSpec> out;
  for (std::int64_t numel : kNumels) {
    zero::ParamSpec spec{"p" + std::to_string(out.size()), numel, dtype, 0};
    if (stage == 3) {
      spec.unit = kUnits[out.size()];
      spec.compute_dtype = dtype;
      spec.sharded = spec.unit >= 0 && out.size() != 3;
    }
    out.push_back(spec);
  }
  return out;
}

// Units are gathered for each use.
inline Options options_of(int stage, std::int64_t bucket_numel = 1 << 20) {
  Options options{.stage = stage, .bucket_numel = bucket_numel, .limits = {.max_reuse_numel = 0, .prefetch_numel = 0}};
  if (stage == 3) options.units = {{"u0"}, {"u1", 0}, {"u2"}};
  return options;
}

inline std::unique_ptr<StepEngine> make_engine(std::shared_ptr<comm::Communicator> comm, const Setting& s) {
  auto engine = std::make_unique<StepEngine>(comm, device::cpu_device(), specs(s.dtype, s.options.stage),
                                             std::vector<optim::Hyper>{s.hyper}, s.options);
  for (int p = 0; p < kNumParams; ++p) {
    std::vector<float> values = gradient(-1, comm->rank() == 0 ? 0 : 99, p);  // other ranks' values must be replaced
    engine->load_param(p, {values.data(), kNumels[p], DType::kF32, {}});
  }
  engine->allocate_states();
  return engine;
}

// All parameters of a unit's buckets, gathered in a forward and released again.
inline std::map<int, std::vector<std::byte>> gather(StepEngine& engine, int unit, bool training) {
  zero::ParamGatherer& gatherer = engine.gatherer();
  std::map<int, std::vector<std::byte>> full;
  const auto plan = gatherer.enter(unit, zero::ParamGatherer::Pass::kForward, training);
  EXPECT_EQ(plan.gather, std::vector<int>{unit});
  for (int b : gatherer.buckets(unit)) {
    const zero::BucketLayout& layout = engine.layout().buckets()[static_cast<std::size_t>(b)];
    full[b].resize(static_cast<std::size_t>(layout.numel * size_bytes(layout.compute_dtype)));
    gatherer.start(b, {full[b].data(), layout.numel, layout.compute_dtype, {}});
  }
  gatherer.wait(unit);
  EXPECT_EQ(gatherer.leave(unit, training).release, std::vector<int>{unit});
  return full;
}

template <class... Arguments>
StepResult stepped(StepEngine& engine, const Arguments&... arguments) {
  engine.step(arguments...);
  return engine.result();
}

inline void run_micro_step(StepEngine& engine, const Setting& s, int rank, int step, int k) {
  for (int unit = 0; unit < engine.gatherer().num_units(); ++unit) gather(engine, unit, true);
  const int j = k * s.num_ranks + rank;
  engine.reducer().begin_micro_step(j < s.micro_batches);
  std::vector<std::vector<std::byte>> grads(std::size(kNumels));
  for (int p = kNumParams - 1; p >= 0; --p) {
    if (p == 3 && j % 2 == 1) continue;
    grads[static_cast<std::size_t>(p)] = in_dtype(gradient(step, j, p), s.dtype);
    engine.reducer().ready(p, {grads[static_cast<std::size_t>(p)].data(), kNumels[p], s.dtype, {}});
  }
  EXPECT_TRUE(engine.reducer().end_micro_step().empty());
  engine.gatherer().end_micro_step();
}

// The bytes of all parameters. Collective in stage 3.
inline std::vector<std::byte> params_of(StepEngine& engine, DType dtype) {
  std::map<int, std::vector<std::byte>> full;
  for (int unit = 0; unit < engine.gatherer().num_units(); ++unit) full.merge(gather(engine, unit, false));
  std::vector<std::byte> out;
  for (int p = 0; p < kNumParams; ++p) {
    const auto where = engine.layout().location(p);
    const auto at = engine.param_memory(p);
    const bool gathered = full.contains(where.bucket);
    const std::byte* begin =
        gathered ? full[where.bucket].data() + where.offset * size_bytes(dtype) : at.memory.get() + at.offset_bytes;
    out.insert(out.end(), begin, begin + kNumels[p] * size_bytes(dtype));
  }
  return out;
}

}  // namespace zc::engine
