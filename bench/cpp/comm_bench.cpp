// Collectives of two ranks that are threads of this process, each with its progress thread: what the communicator adds
// to moving the bytes, and what a small collective costs.
//
// Times are real time of rank 0, from the call to the end of its wait(). bytes_per_second counts the buffer once,
// whatever the number of ranks. Each benchmark fails on a wrong result.
//
//   comm_bench --benchmark_repetitions=9 --benchmark_report_aggregates_only=true      medians, on a noisy machine
#include <benchmark/benchmark.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "zc/comm/local_transport.h"

namespace zc::comm {
namespace {

constexpr int kRanks = 2;
constexpr std::int64_t kLargeNumel = std::int64_t{16} << 20;  // 64 MiB of fp32

// Runs `once` as often as the benchmark wants, on this rank.
using Repeat = std::function<void(const std::function<void()>& once)>;

// body(comm, repeat) on every rank; rank 0 is timed. It returns whether the result is right.
void on_all_ranks(benchmark::State& state, const std::function<bool(Communicator&, const Repeat&)>& body) {
  const auto world = make_local_world(kRanks);
  std::atomic<bool> right{true};
  std::vector<std::thread> others;
  for (int rank = 1; rank < kRanks; ++rank) {
    others.emplace_back([&, rank] {
      Communicator& comm = *world[static_cast<std::size_t>(rank)];
      const bool result = body(comm, [&](const std::function<void()>& once) {
        comm.barrier("start").wait();
        for (benchmark::IterationCount i = 0; i < state.max_iterations; ++i) once();
      });
      if (!result) right = false;
    });
  }
  const bool result = body(*world[0], [&](const std::function<void()>& once) {
    world[0]->barrier("start").wait();
    for (auto _ : state) once();
  });
  for (std::thread& other : others) other.join();
  if (!result || !right) state.SkipWithError("wrong result");
}

BufferView view(std::vector<float>& values) {
  return {values.data(), static_cast<std::int64_t>(values.size()), DType::kF32, {}};
}

void reduce_scatter_add(benchmark::State& state) {
  on_all_ranks(state, [&state](Communicator& comm, const Repeat& repeat) {
    std::vector<float> bucket(kLargeNumel, 1.0f), shard(kLargeNumel / kRanks);
    repeat([&] { comm.reduce_scatter_add(view(bucket), view(shard), "bucket").wait(); });
    return shard.back() == static_cast<float>(kRanks * state.max_iterations);
  });
  state.SetBytesProcessed(state.iterations() * kLargeNumel * 4);
}

void all_gather(benchmark::State& state) {
  const std::int64_t numel = state.range(0);
  on_all_ranks(state, [numel](Communicator& comm, const Repeat& repeat) {
    std::vector<float> full(static_cast<std::size_t>(numel), static_cast<float>(comm.rank()));
    repeat([&] { comm.all_gather(view(full), "bucket").wait(); });
    return full.front() == 0.0f && full.back() == static_cast<float>(kRanks - 1);
  });
  state.SetBytesProcessed(state.iterations() * numel * 4);
}

// As many as are in flight together.
void all_reduce(benchmark::State& state) {
  const auto num_works = static_cast<std::size_t>(state.range(0));
  on_all_ranks(state, [num_works](Communicator& comm, const Repeat& repeat) {
    std::vector<std::int64_t> values(num_works, comm.rank());
    std::vector<Work> works(num_works);
    repeat([&] {
      for (std::size_t i = 0; i < num_works; ++i) {
        works[i] = comm.all_reduce({&values[i], 1}, ReduceOp::kMax, "flag");
      }
      for (const Work& work : works) work.wait();
    });
    return values == std::vector<std::int64_t>(num_works, kRanks - 1);
  });
}

BENCHMARK(reduce_scatter_add)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(all_gather)->Arg(kLargeNumel)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(all_gather)->Arg(1024)->UseRealTime()->Unit(benchmark::kMicrosecond);
BENCHMARK(all_reduce)->Arg(1)->Arg(64)->UseRealTime()->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace zc::comm

BENCHMARK_MAIN();
