// The files of checkpoints against what the disk does by itself.
//
// disk_write and disk_read move one buffer on huge pages, past the page cache, on several threads, and do nothing else:
// the ceiling. write_file and read_ranges also copy and hash every byte. Both writes end on the disk (fsync) and take
// a new file each time. copy_segments is what a save in the background makes training wait for, beside one memcpy.
//
// bytes_per_second counts the state once. Each benchmark fails on a wrong result.
//
//   ZC_BENCH_FOLDER=/on/the/disk ZC_BENCH_GB=4.8 ckpt_bench --benchmark_repetitions=5
//       --benchmark_enable_random_interleaving=true --benchmark_report_aggregates_only=true
//
// The size is 1 GB and the folder the temporary one unless set. Memory: twice the size; disk: the size.
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "zc/ckpt/reader.h"
#include "zc/ckpt/segments.h"
#include "zc/ckpt/writer.h"
#include "zc/io/huge_buffer.h"
#include "zc/io/workers.h"

namespace zc::ckpt {
namespace {

constexpr std::int64_t kBlock = std::int64_t{4} << 20;
constexpr std::int64_t kSegment = 3'000'004;  // tensors end where chunks do not

// Reads every byte once, at the speed of a good hash.
std::uint64_t hash(const void* data, std::size_t bytes) {
  std::uint64_t lanes[8] = {};
  const auto* at = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i + sizeof lanes <= bytes; i += sizeof lanes) {
    for (std::size_t lane = 0; lane < 8; ++lane) {
      std::uint64_t word;
      std::memcpy(&word, at + i + 8 * lane, 8);
      lanes[lane] = (lanes[lane] ^ word) + (lanes[lane] << 7);
    }
  }
  std::uint64_t result = bytes;
  for (std::uint64_t lane : lanes) result = result * 31 + lane;
  return result;
}

std::int64_t state_bytes() {
  const char* gigabytes = std::getenv("ZC_BENCH_GB");
  return static_cast<std::int64_t>((gigabytes == nullptr ? 1.0 : std::atof(gigabytes)) * 1e9) / kBlock * kBlock;
}

// A state, memory to read it back into, and the path of the one file.
struct Bench {
  const std::int64_t bytes = state_bytes();
  io::HugeBuffer state{bytes}, back{bytes};
  std::string path;

  Bench() {
    const char* folder = std::getenv("ZC_BENCH_FOLDER");
    path = (folder == nullptr ? std::filesystem::temp_directory_path() : std::filesystem::path(folder)) /
           ("zc_ckpt_bench_" + std::to_string(getpid()));
    std::uint64_t random = 1;
    for (std::int64_t i = 0; i < bytes; i += 8) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      std::memcpy(state.data() + i, &random, 8);
    }
  }

  std::vector<Segment> segments() const {
    std::vector<Segment> out;
    for (std::int64_t at = 0; at < bytes; at += kSegment) {
      out.push_back({state.data() + at, std::min(kSegment, bytes - at)});
    }
    return out;
  }
  std::vector<Range> ranges() const {
    std::vector<Range> out;
    for (std::int64_t at = 0; at < bytes; at += kSegment) {
      out.push_back({at, std::min(kSegment, bytes - at), back.data() + at});
    }
    return out;
  }

  void clear() const { std::memset(back.data(), 0, static_cast<std::size_t>(bytes)); }
  void check(benchmark::State& run) const {
    if (std::memcmp(state.data(), back.data(), static_cast<std::size_t>(bytes)) != 0) run.SkipWithError("wrong bytes");
  }
  void remove() const { std::filesystem::remove(path); }
};

const Bench& bench() {
  static const Bench instance;
  return instance;
}

template <class Call>
void on_all_blocks(std::int64_t bytes, int num_threads, Call call) {
  io::run_workers(bytes / kBlock, num_threads, [&](int, std::int64_t block) { call(block * kBlock); });
}

void write_plainly(const Bench& b, int num_threads, benchmark::State& run) {
  const int file = open(b.path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_DIRECT, 0600);
  if (file == -1 || fallocate(file, 0, 0, b.bytes) != 0) return run.SkipWithError("no file for direct writes");
  on_all_blocks(b.bytes, num_threads, [&](std::int64_t at) {
    if (pwrite(file, b.state.data() + at, kBlock, at) != kBlock) run.SkipWithError("short write");
  });
  if (fdatasync(file) != 0) run.SkipWithError("fdatasync");
  close(file);
}

void read_plainly(const Bench& b, int num_threads, benchmark::State& run) {
  const int file = open(b.path.c_str(), O_RDONLY | O_DIRECT);
  on_all_blocks(b.bytes, num_threads, [&](std::int64_t at) {
    if (pread(file, b.back.data() + at, kBlock, at) != kBlock) run.SkipWithError("short read");
  });
  close(file);
}

void disk_write(benchmark::State& run) {
  const Bench& b = bench();
  for (auto _ : run) {
    write_plainly(b, static_cast<int>(run.range(0)), run);
    run.PauseTiming();
    b.remove();
    run.ResumeTiming();
  }
  run.SetBytesProcessed(run.iterations() * b.bytes);
}

void disk_read(benchmark::State& run) {
  const Bench& b = bench();
  write_plainly(b, 4, run);
  b.clear();
  for (auto _ : run) read_plainly(b, static_cast<int>(run.range(0)), run);
  b.check(run);
  b.remove();
  run.SetBytesProcessed(run.iterations() * b.bytes);
}

void write_file(benchmark::State& run) {
  const Bench& b = bench();
  const auto segments = b.segments();
  const Options options{&hash, kBlock, static_cast<int>(run.range(0))};
  for (auto _ : run) {
    const auto hashes = ckpt::write_file(b.path, segments, options);
    run.PauseTiming();
    b.clear();
    read_plainly(b, 4, run);
    b.check(run);
    b.remove();
    run.ResumeTiming();
  }
  run.SetBytesProcessed(run.iterations() * b.bytes);
}

void read_ranges(benchmark::State& run) {
  const Bench& b = bench();
  const Options options{&hash, kBlock, static_cast<int>(run.range(0))};
  const auto hashes = ckpt::write_file(b.path, b.segments(), options);
  const auto ranges = b.ranges();
  b.clear();
  for (auto _ : run) ckpt::read_ranges(b.path, b.bytes, hashes, ranges, options);
  b.check(run);
  b.remove();
  run.SetBytesProcessed(run.iterations() * b.bytes);
}

void copy_segments(benchmark::State& run) {
  const Bench& b = bench();
  const auto segments = b.segments();
  b.clear();
  for (auto _ : run) ckpt::copy_segments(segments, b.back.data(), static_cast<int>(run.range(0)));
  b.check(run);
  run.SetBytesProcessed(run.iterations() * b.bytes);
}

void one_memcpy(benchmark::State& run) {
  const Bench& b = bench();
  for (auto _ : run) std::memcpy(b.back.data(), b.state.data(), static_cast<std::size_t>(b.bytes));
  b.check(run);
  run.SetBytesProcessed(run.iterations() * b.bytes);
}

// The argument is the number of threads; 0: one a core.
BENCHMARK(disk_write)->Arg(1)->Arg(2)->Arg(4)->Arg(8)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(write_file)->Arg(2)->Arg(4)->Arg(6)->Arg(8)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(disk_read)->Arg(1)->Arg(2)->Arg(4)->Arg(8)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(read_ranges)->Arg(2)->Arg(4)->Arg(6)->Arg(8)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(one_memcpy)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(copy_segments)->Arg(0)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace zc::ckpt

BENCHMARK_MAIN();
