#include "zc/zero/param_gatherer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "support/ranks.h"

namespace zc::zero {
namespace {

using Pass = ParamGatherer::Pass;
using Plan = ParamGatherer::Plan;
using Ranks = std::shared_ptr<comm::Communicator>;

constexpr std::int64_t kPlenty = 1 << 30;

std::vector<std::byte> in_dtype(const std::vector<std::byte>& values, DType from, DType to) {
  const std::int64_t numel = static_cast<std::int64_t>(values.size()) / size_bytes(from);
  std::vector<std::byte> out(static_cast<std::size_t>(numel * size_bytes(to)));
  device::cpu_kernels().cast({const_cast<std::byte*>(values.data()), numel, from, {}}, {out.data(), numel, to, {}}, {});
  return out;
}

// What the parameter holds, in the dtype it is kept in. `version` changes all values.
std::vector<std::byte> kept_values(int param, const ParamSpec& spec, int version) {
  std::mt19937 random(static_cast<unsigned>(100 * version + param));
  std::normal_distribution<float> normal;
  std::vector<std::byte> bytes(static_cast<std::size_t>(spec.numel * 4));
  for (std::size_t at = 0; at < bytes.size(); at += 4) {
    const float value = normal(random);
    std::memcpy(bytes.data() + at, &value, 4);
  }
  return in_dtype(bytes, DType::kF32, spec.dtype);
}

// The shards of one rank, a gatherer, and the memory of gathered units as its plans have it.
class Model {
 public:
  Model(Ranks comm, std::vector<ParamSpec> params, std::vector<UnitSpec> units, GatherLimits limits,
        std::int64_t bucket_numel = kPlenty)
      : params_(std::move(params)),
        layout_(params_, comm->size(), bucket_numel),
        buckets_(layout_.buckets().size()),
        rank_(comm->rank()),
        limits_(limits) {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      const BucketLayout& layout = layout_.buckets()[b];
      const std::int64_t numel = layout.sharded ? layout.shard_numel : layout.numel;
      memory_.push_back(allocate_host(numel * size_bytes(layout.dtype)));
      buckets_[b].label = "bucket " + std::to_string(b) + " (" +
                          params_[static_cast<std::size_t>(layout.placements.front().param)].name + ")";
      buckets_[b].shard_offset = rank_ * layout.shard_numel;
      buckets_[b].kept_offset = layout.sharded ? buckets_[b].shard_offset : 0;
      buckets_[b].params = {memory_.back().get(), numel, layout.dtype, {}};
    }
    gathers.resize(units.size());
    gatherer = std::make_unique<ParamGatherer>(comm, device::cpu_device(), layout_, buckets_, std::move(units), limits,
                                               nullptr);
    write(0);
  }

  // Sets all kept values.
  void write(int version) {
    expected_.resize(params_.size());
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      for (const Placement& p : layout_.buckets()[b].placements) {
        const ParamSpec& spec = params_[static_cast<std::size_t>(p.param)];
        const auto values = kept_values(p.param, spec, version);
        expected_[static_cast<std::size_t>(p.param)] = in_dtype(values, spec.dtype, spec.compute_dtype);
        const std::int64_t size = size_bytes(layout_.buckets()[b].dtype);
        const std::int64_t first = std::max(p.offset, buckets_[b].kept_offset);
        const std::int64_t last = std::min(p.offset + p.numel, buckets_[b].kept_offset + buckets_[b].params.numel);
        if (first >= last) continue;
        std::memcpy(buckets_[b].params.as<std::byte>() + (first - buckets_[b].kept_offset) * size,
                    values.data() + (first - p.offset) * size, static_cast<std::size_t>((last - first) * size));
      }
    }
  }

  Plan enter(int unit, Pass pass = Pass::kForward, bool training = true) {
    const Plan plan = carry_out(gatherer->enter(unit, pass, training));
    expect_whole(unit);
    return plan;
  }
  Plan leave(int unit, bool training = true) { return carry_out(gatherer->leave(unit, training)); }
  Plan need(int unit) {
    const Plan plan = carry_out(gatherer->need(unit));
    expect_whole(unit);
    return plan;
  }
  Plan end_backward() { return carry_out(gatherer->end_backward()); }
  Plan invalidate() { return carry_out(gatherer->invalidate()); }

  // One after the other.
  void forward(std::initializer_list<int> units, bool training = true) {
    for (int unit : units) {
      enter(unit, Pass::kForward, training);
      leave(unit, training);
    }
  }
  void backward(std::initializer_list<int> units) {
    for (int unit : units) need(unit);
    end_backward();
  }
  void micro_step(std::initializer_list<int> units) {
    forward(units);
    for (auto unit = std::rbegin(units); unit != std::rend(units); ++unit) need(*unit);
    end_backward();
    gatherer->end_micro_step();
  }

  Plan carry_out(Plan plan) {
    for (int unit : plan.release) {
      EXPECT_EQ(held.erase(unit), 1u) << "unit " << unit << " was released but not held";
      for (int bucket : gatherer->buckets(unit)) full_.erase(bucket);
      EXPECT_EQ(std::count(plan.gather.begin(), plan.gather.end(), unit), 0) << "released and gathered at once";
    }
    for (int unit : plan.gather) {
      EXPECT_TRUE(held.insert(unit).second) << "unit " << unit << " was gathered but held";
      ++gathers[static_cast<std::size_t>(unit)];
      start(unit);
    }
    std::int64_t live = 0;
    for (int unit : held) live += numel(unit);
    EXPECT_EQ(gatherer->live_numel(), live);
    EXPECT_LE(live, gatherer->peak_live_numel());
    if (bounded) {
      EXPECT_LE(live, limits_.max_live_numel);
    }
    return plan;
  }

  void start(int unit) {
    for (int b : gatherer->buckets(unit)) {
      const BucketLayout& layout = layout_.buckets()[static_cast<std::size_t>(b)];
      auto& full = full_[b];
      full.assign(static_cast<std::size_t>(layout.numel * size_bytes(layout.compute_dtype)), std::byte{0xa5});
      gatherer->start(b, {full.data(), layout.numel, layout.compute_dtype, {}});
    }
  }

  // The unit's parameters have the values of the last write(), in their compute dtypes.
  void expect_whole(int unit) {
    gatherer->wait(unit);
    ASSERT_TRUE(held.contains(unit)) << "unit " << unit;
    for (int b : gatherer->buckets(unit)) {
      const BucketLayout& layout = layout_.buckets()[static_cast<std::size_t>(b)];
      for (const Placement& p : layout.placements) {
        const ParamSpec& spec = params_[static_cast<std::size_t>(p.param)];
        const std::vector<std::byte>& expected = expected_[static_cast<std::size_t>(p.param)];
        const std::byte* got = full_.at(b).data() + p.offset * size_bytes(layout.compute_dtype);
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), got))
            << spec.name << " from " << name(spec.dtype) << " to " << name(spec.compute_dtype);
      }
    }
  }

  std::int64_t numel(int unit) const {
    std::int64_t sum = 0;
    for (int b : gatherer->buckets(unit)) sum += layout_.buckets()[static_cast<std::size_t>(b)].numel;
    return sum;
  }

  std::set<int> held;        // units
  std::vector<int> gathers;  // so far, of each unit
  bool bounded = true;       // check that the bound holds

 private:
  std::vector<ParamSpec> params_;
  ShardLayout layout_;
  std::vector<Memory> memory_;
  std::vector<Bucket> buckets_;
  std::map<int, std::vector<std::byte>> full_;  // by bucket
  int rank_;
  std::vector<std::vector<std::byte>> expected_;  // values of each parameter in its compute dtype
  GatherLimits limits_;

 public:
  std::unique_ptr<ParamGatherer> gatherer;  // goes first
};

struct UnitSize {
  std::int64_t blocks;  // of 1024 elements
  int parent = -1;
};

// One sharded fp32 parameter a unit.
std::unique_ptr<Model> make_model(Ranks comm, const std::vector<UnitSize>& sizes, GatherLimits limits) {
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> units;
  for (const UnitSize& size : sizes) {
    const int unit = static_cast<int>(units.size());
    const std::string name = "u" + std::to_string(unit);
    params.push_back({.name = name + ".weight", .numel = size.blocks * kBlockNumel, .unit = unit, .sharded = true});
    units.push_back({name, size.parent});
  }
  return std::make_unique<Model>(comm, params, units, limits);
}

// For what does not depend on the number of ranks: limits in blocks.
void with_model(const std::vector<UnitSize>& sizes, GatherLimits blocks, const std::function<void(Model&)>& body) {
  test::run_ranks(1, [&](Ranks comm) {
    const auto model = make_model(comm, sizes,
                                  {.max_live_numel = blocks.max_live_numel * kBlockNumel,
                                   .max_reuse_numel = blocks.max_reuse_numel * kBlockNumel,
                                   .prefetch_numel = blocks.prefetch_numel * kBlockNumel});
    body(*model);
  });
}

using Units = std::vector<int>;

void expect_plan(const Plan& plan, const Units& release, const Units& gather) {
  EXPECT_EQ(plan.release, release);
  EXPECT_EQ(plan.gather, gather);
}

void expect_error(ErrorKind kind, const std::vector<std::string>& parts, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << "it says: " << error.what();
    }
  }
}

// --- Values

TEST(ParamGathererTest, GathersWhatIsKeptInTheDtypeOfComputation) {
  const std::pair<DType, DType> dtypes[] = {
      {DType::kF32, DType::kF32}, {DType::kBF16, DType::kBF16}, {DType::kF16, DType::kF16}, {DType::kBF16, DType::kF32},
      {DType::kF16, DType::kF32}, {DType::kF32, DType::kBF16},  {DType::kF32, DType::kF16}, {DType::kF16, DType::kBF16},
  };
  for (int num_ranks : {1, 2, 3, 4}) {
    for (const auto& [kept, compute] : dtypes) {
      for (std::int64_t bucket_numel : {std::int64_t{4096}, kPlenty}) {
        test::run_ranks(num_ranks, [&](Ranks comm) {
          std::vector<ParamSpec> params;
          for (std::int64_t numel : {5, 3000, 0, 1024, 65, 9000, 1}) {
            for (bool sharded : {true, false}) {
              for (int unit : {0, 1}) {
                params.push_back({.name = "p" + std::to_string(params.size()),
                                  .numel = numel,
                                  .dtype = kept,
                                  .unit = unit,
                                  .compute_dtype = compute,
                                  .sharded = sharded,
                                  .trainable = params.size() % 3 != 0});
              }
            }
          }
          Model model(comm, params, {{"first"}, {"second"}}, {}, bucket_numel);
          for (int version : {0, 1}) {
            model.enter(0);
            model.enter(1);
            model.leave(1);
            model.leave(0);
            model.invalidate();
            EXPECT_TRUE(model.held.empty());
            model.write(version + 1);
          }
        });
      }
    }
  }
}

TEST(ParamGathererTest, UnitsMayBeEmptyOrHaveNoElements) {
  test::run_ranks(3, [](Ranks comm) {
    Model model(comm, {{.name = "none", .numel = 0, .unit = 1, .sharded = true}}, {{"empty"}, {"zero"}},
                {.max_live_numel = 0, .max_reuse_numel = 0, .prefetch_numel = 0});
    for (int step = 0; step < 2; ++step) model.micro_step({0, 1});
    EXPECT_EQ(model.gatherer->peak_live_numel(), 0);
  });
}

TEST(ParamGathererTest, AWholeUnitIsGatheredAgainWhenItsValuesChanged) {
  test::run_ranks(2, [](Ranks comm) {
    const auto model = make_model(comm, {{2}}, {});
    model->enter(0, Pass::kDemand, false);
    model->write(1);
    model->start(0);
    model->expect_whole(0);
    model->leave(0, false);
  });
}

// What travels is the narrower of the dtypes.
TEST(ParamGathererTest, TrafficIsOnePsiAForwardAndOneABackward) {
  for (DType compute : {DType::kF32, DType::kBF16}) {
    test::run_ranks(4, [&](Ranks comm) {
      std::vector<ParamSpec> params;
      for (int unit : {0, 1, 2}) {
        params.push_back({.name = "w", .numel = 8192, .unit = unit, .compute_dtype = compute, .sharded = true});
      }
      Model model(comm, params, {{"a"}, {"b"}, {"c"}}, {.max_reuse_numel = 0});
      const auto gathered = [&] { return comm->counters()[static_cast<std::size_t>(comm::Op::kAllGather)].elements; };
      for (int step = 0; step < 3; ++step) {
        const std::int64_t before = gathered();
        model.micro_step({0, 1, 2});
        EXPECT_EQ(gathered() - before, 2 * 3 * 8192) << "step " << step;
      }
      EXPECT_TRUE(model.held.empty());
    });
  }
}

// --- Plans

TEST(ParamGathererTest, CallsNest) {
  with_model({{1}, {1, 0}, {1, 0}}, {kPlenty, 0, 0}, [](Model& m) {
    expect_plan(m.enter(0), {}, {0});
    expect_plan(m.enter(1), {}, {1});
    expect_plan(m.leave(1), {1}, {});
    expect_plan(m.enter(2), {}, {2});
    expect_plan(m.enter(2), {}, {});  // a module that calls itself
    expect_plan(m.leave(2), {}, {});
    expect_plan(m.leave(2), {2}, {});
    expect_plan(m.leave(0), {0}, {});
    EXPECT_EQ(m.gatherer->peak_live_numel(), 2 * kBlockNumel);
  });
}

TEST(ParamGathererTest, WithoutReuseAUnitIsGatheredForEachUse) {
  with_model({{1}, {1}, {1}}, {kPlenty, 0, 0}, [](Model& m) {
    for (int step = 1; step <= 3; ++step) {
      m.micro_step({0, 1, 2});
      EXPECT_EQ(m.gathers, (Units{2 * step, 2 * step, 2 * step}));
    }
    EXPECT_EQ(m.gatherer->peak_live_numel(), kBlockNumel);
  });
}

TEST(ParamGathererTest, AUnitUsedTwiceInAForwardIsGatheredTwice) {
  with_model({{1}, {1}}, {kPlenty, 0, 0}, [](Model& m) {
    for (int step = 1; step <= 3; ++step) {
      m.forward({0, 1, 0});
      m.backward({0, 1, 0});
      m.gatherer->end_micro_step();
      EXPECT_EQ(m.gathers, (Units{4 * step, 2 * step}));
    }
  });
}

TEST(ParamGathererTest, AUnitIsKeptWhenItsNextUseIsNear) {
  // Elements used between a unit's forward and its backward: none, 2 blocks, 4 blocks.
  with_model({{1}, {1}, {1}}, {kPlenty, 3, 0}, [](Model& m) {
    m.micro_step({0, 1, 2});
    EXPECT_EQ(m.gathers, (Units{2, 2, 2}));  // nothing was known about it yet
    m.micro_step({0, 1, 2});
    EXPECT_EQ(m.gathers, (Units{4, 3, 3}));
    m.forward({0, 1, 2}, false);  // an evaluation keeps nothing and predicts nothing
    EXPECT_EQ(m.gathers, (Units{5, 4, 4}));
    EXPECT_TRUE(m.held.empty());
    m.micro_step({0, 1, 2});
    EXPECT_EQ(m.gathers, (Units{7, 5, 5}));
  });
}

TEST(ParamGathererTest, EverythingIsKeptWhenNoUseIsFar) {
  with_model({{1}, {1}, {1}}, {kPlenty, 7, 0}, [](Model& m) {
    m.forward({0, 1, 2}, false);
    for (int step = 0; step < 3; ++step) m.micro_step({0, 1, 2});
    EXPECT_EQ(m.gathers, (Units{1, 1, 1}));
    expect_plan(m.invalidate(), {0, 1, 2}, {});
    m.forward({0});
    EXPECT_EQ(m.gathers, (Units{2, 1, 1}));
  });
}

TEST(ParamGathererTest, PrefetchesInTheOrderOfTheLastMicroStep) {
  with_model({{1}, {1}, {1}, {1}}, {kPlenty, 0, 2}, [](Model& m) {
    for (int unit : {2, 0, 3, 1}) {  // nothing is predicted yet
      expect_plan(m.enter(unit), {}, {unit});
      m.leave(unit);
    }
    for (int unit : {1, 3, 0, 2}) m.need(unit);
    m.end_backward();
    m.gatherer->end_micro_step();

    expect_plan(m.enter(2), {}, {2, 0, 3});
    expect_plan(m.leave(2), {2}, {});
    expect_plan(m.enter(0), {}, {1});
    expect_plan(m.leave(0), {0}, {});
    expect_plan(m.enter(3), {}, {});  // ahead are the forward and the backward of 1
    expect_plan(m.leave(3), {3}, {});
    expect_plan(m.enter(1), {}, {3});  // ahead are the backwards of 1 and 3
    expect_plan(m.leave(1), {1}, {});
    expect_plan(m.need(1), {}, {1, 0});
    expect_plan(m.need(1), {}, {});
    expect_plan(m.need(3), {1}, {2});
    expect_plan(m.need(0), {3}, {});
    expect_plan(m.need(2), {0}, {});
    expect_plan(m.end_backward(), {2}, {});
    EXPECT_EQ(m.gatherer->peak_live_numel(), 3 * kBlockNumel);
  });
}

TEST(ParamGathererTest, AnEvaluationPrefetchesNothing) {
  with_model({{1}, {1}}, {kPlenty, 0, kPlenty}, [](Model& m) {
    m.micro_step({0, 1});
    expect_plan(m.enter(0, Pass::kForward, false), {}, {0});
    expect_plan(m.leave(0, false), {0}, {});
  });
}

TEST(ParamGathererTest, PrefetchStopsAtTheBoundAndGivesNothingUp) {
  with_model({{1}, {1}, {2}, {1}}, {3, kPlenty, kPlenty}, [](Model& m) {
    m.micro_step({0, 1, 2, 3});
    m.invalidate();
    expect_plan(m.enter(0), {}, {0, 1});  // no room for 2, and 3 must not come first
    m.leave(0);
    expect_plan(m.enter(1), {}, {});
    m.leave(1);
    expect_plan(m.enter(2), {0}, {2});
  });
}

TEST(ParamGathererTest, WhatTheSamePlanWouldReleaseAndPrefetchStays) {
  with_model({{1}, {1}}, {kPlenty, 0, 1}, [](Model& m) {
    for (int step = 0; step < 2; ++step) {
      m.forward({0, 1, 0});
      m.need(0);
      expect_plan(m.need(1), step ? Units{} : Units{0}, step ? Units{} : Units{1});
      m.need(0);
      m.end_backward();
      m.gatherer->end_micro_step();
    }
  });
}

TEST(ParamGathererTest, TheUnitThatABackwardEndedWithIsThereForTheNextForward) {
  with_model({{1}, {1}}, {kPlenty, 0, 0}, [](Model& m) {
    m.forward({0, 1});
    for (int unit : {1, 0}) m.need(unit);
    expect_plan(m.enter(0), {}, {});
    expect_plan(m.leave(0), {0}, {});
    m.need(1);
    expect_plan(m.enter(0), {1}, {0});
  });
}

TEST(ParamGathererTest, GivesUpTheUnitUsedLast) {
  with_model({{1}, {1}, {1}, {1}}, {3, kPlenty, 0}, [](Model& m) {
    m.micro_step({0, 1, 2, 3});
    m.invalidate();
    m.forward({0, 1, 2});
    expect_plan(m.enter(3), {0}, {3});
    m.leave(3);
    for (int unit : {3, 2, 1}) expect_plan(m.need(unit), {}, {});
    expect_plan(m.need(0), {1}, {0});  // none is used again: the first of them
  });
}

TEST(ParamGathererTest, NestedUnitsAreNeededTogetherInTheBackward) {
  with_model({{1}, {1, 0}, {1, 0}, {1}}, {kPlenty, 0, 0}, [](Model& m) {
    expect_plan(m.need(3), {}, {3});
    expect_plan(m.need(0), {3}, {0});
    expect_plan(m.need(2), {}, {2});
    expect_plan(m.need(0), {}, {});  // its own part, between those of its children
    expect_plan(m.need(1), {2}, {1});
    expect_plan(m.need(3), {1, 0}, {3});
    expect_plan(m.need(1), {3}, {1});  // without the unit around it
    expect_plan(m.need(0), {1}, {0});
    expect_plan(m.end_backward(), {0}, {});
    expect_plan(m.end_backward(), {}, {});
  });
}

TEST(ParamGathererTest, RecomputationInABackwardHoldsWhatItRuns) {
  with_model({{1}, {1, 0}, {1, 0}}, {3, 0, 0}, [](Model& m) {
    for (int step = 1; step <= 2; ++step) {
      m.enter(0, Pass::kForward, false);
      for (int unit : {1, 2}) m.forward({unit}, false);
      m.leave(0, false);
      expect_plan(m.enter(0, Pass::kBackward), {}, {0});
      expect_plan(m.enter(1, Pass::kBackward), {}, {1});
      expect_plan(m.leave(1), {}, {});  // until the backward goes on to another unit
      expect_plan(m.enter(2, Pass::kBackward), {1}, {2});
      expect_plan(m.leave(2), {}, {});
      expect_plan(m.leave(0), {}, {});
      expect_plan(m.need(2), {}, {});
      expect_plan(m.need(1), {2}, {1});
      expect_plan(m.need(0), {}, {});
      expect_plan(m.end_backward(), {1, 0}, {});
      m.gatherer->end_micro_step();
      EXPECT_EQ(m.gathers, (Units{2 * step, 3 * step, 2 * step}));
    }
  });
}

TEST(ParamGathererTest, AnOpenCallOutlastsWhatTheBackwardNeeds) {
  with_model({{1}, {1}}, {kPlenty, 0, 0}, [](Model& m) {
    m.enter(0, Pass::kBackward);
    expect_plan(m.need(1), {}, {1});  // 0 is no longer needed, but its call is open
    expect_plan(m.leave(0), {0}, {});
  });
}

TEST(ParamGathererTest, SeveralForwardsMayComeBeforeOneBackward) {
  with_model({{1}, {1}}, {kPlenty, 1, 0}, [](Model& m) {
    for (int step = 1; step <= 3; ++step) {
      m.forward({0, 1, 0, 1});
      m.backward({1, 0, 1, 0});
      m.gatherer->end_micro_step();
    }
    // Every use is a gather in the first step. Later, in the backward, the unit before last is always next.
    EXPECT_EQ(m.gathers, (Units{4 + 3 + 3, 4 + 2 + 2}));
  });
}

TEST(ParamGathererTest, AnotherPathThanLastTimeIsFollowed) {
  with_model({{1}, {1}, {1}}, {2, kPlenty, kPlenty}, [](Model& m) {
    m.micro_step({0, 1, 2});
    m.micro_step({2, 0});
    m.micro_step({1, 1, 0, 2});
    m.micro_step({});
    m.micro_step({0, 1, 2});
  });
}

TEST(ParamGathererTest, WhatIsGatheredOnDemandMayExceedTheBoundAndIsNotKeptAboveIt) {
  with_model({{1}, {2}, {2}}, {2, kPlenty, 0}, [](Model& m) {
    m.forward({0});
    m.bounded = false;
    for (int unit : {1, 2}) expect_plan(m.enter(unit, Pass::kDemand, false), {}, {unit});
    EXPECT_EQ(m.gatherer->live_numel(), 5 * kBlockNumel);
    expect_plan(m.leave(2, false), {2}, {});
    expect_plan(m.leave(1, false), {1}, {});
    m.bounded = true;
    m.forward({0});
    EXPECT_EQ(m.gathers[0], 1);
  });
}

TEST(ParamGathererTest, AUseInsideAGatherOnDemandFindsTheUnitThere) {
  with_model({{1}, {1}}, {2, 0, 0}, [](Model& m) {
    for (int unit : {0, 1}) m.enter(unit, Pass::kDemand, false);
    expect_plan(m.enter(0), {}, {});
    expect_plan(m.leave(0), {}, {});
    expect_plan(m.need(0), {}, {});
    expect_plan(m.end_backward(), {}, {});
    for (int unit : {0, 1}) expect_plan(m.leave(unit, false), {unit}, {});
  });
}

// --- Errors

TEST(ParamGathererTest, AUnitMustFitWithThoseAroundIt) {
  with_model({{1}, {2, 0}, {1, 1}}, {4, 0, 0}, [](Model& m) {
    m.enter(0);
    m.enter(1);
    m.enter(2);
  });
  expect_error(ErrorKind::kConfig,
               {"[zero] unit \"u2\" has 1024 elements, with the units around it 4096", "max_live_numel = 3072",
                "stage3_max_live_parameters", "expected at least 4096", "zero.unit_classes"},
               [] { with_model({{1}, {2, 0}, {1, 1}}, {3, 0, 0}, [](Model&) {}); });
}

TEST(ParamGathererTest, UnitsInUseMustFitAndAFailureLeavesNothingBehind) {
  with_model({{1}, {2}, {1}}, {2, kPlenty, 0}, [](Model& m) {
    m.forward({2});
    m.enter(0);  // and in its call 1, which does not lie within it
    expect_error(ErrorKind::kConfig,
                 {"[zero] unit \"u1\" needs 2048 elements beside the 1024 in use", "max_live_numel = 2048",
                  "expected at least 3072", "Raise it"},
                 [&] { m.enter(1); });
    expect_plan(m.leave(1), {2}, {});  // given up for 1 before it turned out that it was not enough
    m.leave(0);
    expect_plan(m.enter(1), {0}, {1});
    m.leave(1);
    m.invalidate();
    EXPECT_TRUE(m.held.empty());
  });
}

TEST(ParamGathererTest, ParametersInUseAreNotUpdated) {
  with_model({{1}, {1}}, {kPlenty, kPlenty, 0}, [](Model& m) {
    m.forward({0});
    m.enter(1, Pass::kDemand, false);
    expect_error(ErrorKind::kConfig,
                 {"[zero] unit \"u1\" is in use while its parameters are updated", "unsharded()", "Leave the block"},
                 [&] { m.invalidate(); });
    EXPECT_EQ(m.gatherer->live_numel(), 2 * kBlockNumel);
    m.leave(1, false);
    expect_plan(m.invalidate(), {0, 1}, {});
  });
}

TEST(ParamGathererTest, AStepEndsWhatABackwardNeeded) {
  with_model({{1}}, {kPlenty, kPlenty, 0}, [](Model& m) {
    m.need(0);
    expect_plan(m.invalidate(), {0}, {});
    expect_plan(m.need(0), {}, {0});
  });
}

TEST(ParamGathererTest, MisuseIsAnError) {
  with_model({{1}, {1}}, {kPlenty, 0, 0}, [](Model& m) {
    expect_error(ErrorKind::kInternal, {"left more often"}, [&] { m.leave(0); });
    expect_error(ErrorKind::kInternal, {"no unit 2"}, [&] { m.enter(2); });
    expect_error(ErrorKind::kInternal, {"without a plan"}, [&] { m.start(0); });
    m.enter(0);
    std::vector<float> small(1);
    expect_error(ErrorKind::kInternal, {"bucket 1 (u0.weight) gathered into 1 elements of fp32"},
                 [&] { m.gatherer->start(m.gatherer->buckets(0)[0], {small.data(), 1, DType::kF32, {}}); });
    m.leave(0);
  });
  EXPECT_THROW(with_model({{1, 1}, {1}}, {kPlenty, 0, 0}, [](Model&) {}), Error);  // inside a later unit
}

TEST(ParamGathererTest, RanksThatGatherOtherUnitsAreToldBoth) {
  std::vector<std::string> errors(2);
  test::run_ranks(2, [&](Ranks comm) {
    const auto model = make_model(comm, {{2}, {2}}, {});
    try {
      model->enter(comm->rank());
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kComm);
      errors[static_cast<std::size_t>(comm->rank())] = error.what();
    }
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("rank 0 is in gather bucket 1 (u0.weight)"), std::string::npos) << error;
    EXPECT_NE(error.find("rank 1 is in gather bucket 0 (u1.weight)"), std::string::npos) << error;
  }
}

// The memory of gathered units may go with the gatherer. (AddressSanitizer tells.)
TEST(ParamGathererTest, AGathererWaitsForItsGathers) {
  test::run_ranks(2, [](Ranks comm) {
    const auto model = make_model(comm, {{2}, {2}}, {});
    if (comm->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // rank 0 waits for this one
    for (int unit : {0, 1}) model->carry_out(model->gatherer->enter(unit, Pass::kForward, true));
  });
}

TEST(ParamGathererTest, AUnitOnItsWayIsReleasedWhenItHasArrived) {
  test::run_ranks(2, [](Ranks comm) {
    const auto model = make_model(comm, {{2}, {2}}, {});
    if (comm->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    model->carry_out(model->gatherer->enter(0, Pass::kForward, true));
    model->leave(0);
    model->invalidate();
    EXPECT_TRUE(model->held.empty());
  });
}

// --- Any sequence of calls

// Trees of units, bounds and sequences of calls at random, but equal on all ranks. The model checks every plan.
class RandomWalk {
 public:
  RandomWalk(Ranks comm, unsigned seed) : random_(seed) {
    const int num_units = 1 + pick(8);
    std::int64_t total = 0;
    std::int64_t least = 0;  // that a unit with those around it needs
    std::vector<std::int64_t> chain;
    for (int unit = 0; unit < num_units; ++unit) {
      sizes_.push_back({pick(5), pick(unit + 1) - 1});
      const int parent = sizes_.back().parent;
      // A shard is a whole number of blocks.
      const std::int64_t blocks = (sizes_.back().blocks + comm->size() - 1) / comm->size() * comm->size();
      chain.push_back(blocks + (parent < 0 ? 0 : chain[static_cast<std::size_t>(parent)]));
      least = std::max(least, chain.back());
      total += blocks;
    }
    const auto limit = [&](std::int64_t blocks) { return blocks * kBlockNumel; };
    model_ = make_model(comm, sizes_,
                        {.max_live_numel = limit(least + (pick(3) ? pick(static_cast<int>(total) + 1) : 0)),
                         .max_reuse_numel = limit(pick(3) ? pick(static_cast<int>(3 * total) + 1) : 0),
                         .prefetch_numel = limit(pick(3) ? pick(static_cast<int>(total) + 1) : 0)});
  }

  void run(int micro_steps) {
    for (int step = 0; step < micro_steps && !::testing::Test::HasFailure(); ++step) {
      if (pick(4) == 0) demand();
      if (pick(4) == 0) forward(-1, false);
      const unsigned path = pick(3) ? 1 : random_();  // mostly as last time
      std::mt19937 own(path);
      std::swap(random_, own);
      for (int forwards = 1 + pick(2); forwards > 0; --forwards) forward(-1, true);
      std::swap(random_, own);
      backward();
      model_->gatherer->end_micro_step();
      if (pick(3) == 0) {
        model_->invalidate();
        EXPECT_TRUE(model_->held.empty());
        model_->write(step + 1);
      }
    }
  }

 private:
  int pick(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }

  // Units directly within `unit`, some of them, some twice.
  Units children(int unit) {
    Units out;
    for (int child = 0; child < static_cast<int>(sizes_.size()); ++child) {
      if (sizes_[static_cast<std::size_t>(child)].parent != unit) continue;
      for (int times = std::min(2, pick(4)); times > 0; --times) out.push_back(child);
    }
    std::shuffle(out.begin(), out.end(), random_);
    return out;
  }

  void expect_open_calls_whole() {
    for (int unit : open_) model_->expect_whole(unit);
  }

  void forward(int within, bool training, Pass pass = Pass::kForward) {
    for (int unit : children(within)) {
      model_->enter(unit, pass, training);
      open_.push_back(unit);
      forward(unit, training, pass);
      expect_open_calls_whole();
      open_.pop_back();
      model_->leave(unit, training);
      if (training && pass == Pass::kForward) uses_.push_back(unit);
    }
  }

  void backward() {
    for (; !uses_.empty(); uses_.pop_back()) {
      const int unit = uses_.back();
      if (pick(4) == 0) {  // it is computed again first
        model_->enter(unit, Pass::kBackward);
        open_.push_back(unit);
        forward(unit, true, Pass::kBackward);
        expect_open_calls_whole();
        open_.pop_back();
        model_->leave(unit);
      }
      model_->need(unit);
      const int parent = sizes_[static_cast<std::size_t>(unit)].parent;
      if (parent >= 0 && pick(2)) model_->need(parent);
      if (pick(20) == 0) model_->end_backward();
    }
    if (pick(2)) model_->end_backward();  // else the next forward ends it
  }

  void demand() {
    model_->bounded = false;
    Units units;
    for (int i = pick(4); i > 0; --i) units.push_back(pick(static_cast<int>(sizes_.size())));
    model_->end_backward();
    for (int unit : units) model_->enter(unit, Pass::kDemand, false);
    for (int unit : units) model_->expect_whole(unit);
    model_->bounded = units.empty();
    for (std::size_t i = 0; i < units.size(); ++i) {
      model_->bounded = i + 1 == units.size();
      model_->leave(units[i], false);
    }
    model_->bounded = true;
  }

  std::mt19937 random_;
  std::vector<UnitSize> sizes_;
  std::unique_ptr<Model> model_;
  Units open_;  // calls
  Units uses_;  // forward uses whose backward is still to come
};

TEST(ParamGathererTest, EveryPlanKeepsTheBoundAndEveryUnitInUseIsWhole) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    test::run_ranks(1, [&](Ranks comm) { RandomWalk(comm, seed).run(6); });
    if (HasFailure()) return;
  }
}

// The guard would end gathers that differ or come in another order.
TEST(ParamGathererTest, AllRanksGatherInOneOrder) {
  for (unsigned seed = 1000; seed < 1020; ++seed) {
    SCOPED_TRACE(seed);
    test::run_ranks(2 + static_cast<int>(seed % 3), [&](Ranks comm) { RandomWalk(comm, seed).run(4); });
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace zc::zero
