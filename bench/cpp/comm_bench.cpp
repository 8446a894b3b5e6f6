// Collectives between processes of this node over shared memory, with the columns of nccl-tests, and beside each the
// floor: what moving the bytes once costs, in plain loops over memory that all processes share, measured in turns with
// the collective. Times are of the slowest rank, from the call to the end of its wait(): medians, and the best, which
// say more on a machine that others use.
//
//   comm_bench [--ranks=2] [--reps=15] [--max-mib=256] [--json=FILE]      4 ranks on 2 cores: --ranks=4
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "zc/base/half.h"
#include "zc/comm/shm_transport.h"
#include "zc/comm/transport_communicator.h"

namespace zc::comm {
namespace {

constexpr int kMaxRanks = 8;
constexpr std::int64_t kSmallCalls = 200;  // small collectives are timed so many at a time

double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// What the processes share beside the communicator.
struct Shared {
  std::atomic<int> arrived{0}, round{0};
  double seconds[kMaxRanks];
  std::int64_t values[kMaxRanks][128];
  std::byte bytes[1 << 16];
};

class Rank {
 public:
  Rank(int rank, int size, int reps, Shared* shared, std::byte* arena, std::int64_t arena_bytes)
      : rank_(rank), size_(size), reps_(reps), shared_(shared), arena_(arena), arena_bytes_(arena_bytes) {
    std::string reason;
    auto transport = connect_shm(
        rank, size,
        [this](std::span<const std::byte> own, std::span<std::byte> all) {
          std::memcpy(shared_->bytes + static_cast<std::size_t>(rank_) * own.size(), own.data(), own.size());
          meet();
          std::memcpy(all.data(), shared_->bytes, all.size());
          meet();
        },
        &reason);
    ZC_CHECK(transport != nullptr, kComm, reason);
    comm_ = make_transport_communicator(std::move(transport));
  }

  void run(std::int64_t max_bytes) {
    if (rank_ == 0) {
      std::printf(
          "# %d ranks, processes of this node, %d times each\n%12s %12s %-6s %-18s %10s %8s %8s %10s %6s %10s %10s %6s "
          "%6s\n",
          size_, reps_, "size(B)", "count", "type", "collective", "time(us)", "algbw", "busbw", "floor(us)", "ratio",
          "best(us)", "floor", "ratio", "#wrong");
    }
    barrier();
    all_reduce();
    for (std::int64_t bytes = 1 << 20; bytes <= max_bytes; bytes *= 4) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) reduce_scatter_add(bytes, dtype);
      all_gather(bytes);
    }
  }

 private:
  void barrier() {
    const auto floor = [this] {
      for (int i = 0; i < kSmallCalls; ++i) meet();
    };
    const auto call = [this] {
      for (int i = 0; i < kSmallCalls; ++i) comm_->barrier("barrier").wait();
    };
    report("barrier", 0, DType::kU8, 0, kSmallCalls, floor, call, [] { return 0; });
  }

  void all_reduce() {
    constexpr std::size_t kNumel = 128;
    std::vector<std::int64_t> values(kNumel, 0);
    const auto floor = [&] {
      for (int i = 0; i < kSmallCalls; ++i) {
        std::memcpy(shared_->values[rank_], values.data(), kNumel * 8);
        meet();
        for (int r = 0; r < size_; ++r) {
          for (std::size_t k = 0; k < kNumel; ++k) values[k] = std::max(values[k], shared_->values[r][k]);
        }
        meet();
      }
    };
    const auto call = [&] {
      std::fill(values.begin(), values.end(), rank_);
      for (int i = 0; i < kSmallCalls; ++i) comm_->all_reduce(values, ReduceOp::kMax, "norm").wait();
    };
    report("all_reduce", kNumel * 8, DType::kI64, 2.0 * (size_ - 1) / size_, kSmallCalls, floor, call,
           [&] { return std::count_if(values.begin(), values.end(), [&](auto v) { return v != size_ - 1; }); });
  }

  void reduce_scatter_add(std::int64_t bytes, DType dtype) {
    const std::int64_t numel = bytes / size_bytes(dtype), part = numel / size_;
    const Memory bucket = comm_->allocate(bytes), shard = comm_->allocate(part * 4);
    const auto fill = [&](void* data) {
      for (std::int64_t i = 0; i < numel; ++i) {
        if (dtype == DType::kF32) static_cast<float*>(data)[i] = 1.0f;
        if (dtype == DType::kBF16) static_cast<std::uint16_t*>(data)[i] = 0x3f80;
      }
    };
    fill(bucket.get());
    fill(slice(rank_));
    auto* sums = reinterpret_cast<float*>(shard.get());
    const Memory private_sums = allocate_host(part * 4);
    const auto floor = [&] {
      auto* into = reinterpret_cast<float*>(private_sums.get());
      for (int r = 0; r < size_; r += 2) {
        const std::byte* a = slice(r) + rank_ * part * size_bytes(dtype);
        const std::byte* b = slice(r + 1) + rank_ * part * size_bytes(dtype);
        if (dtype == DType::kF32) {
          add(into, reinterpret_cast<const float*>(a), reinterpret_cast<const float*>(b), part, r == 0);
        } else {
          add(into, reinterpret_cast<const BF16*>(a), reinterpret_cast<const BF16*>(b), part, r == 0);
        }
      }
      meet();
    };
    int calls = 0;
    const auto call = [&] {
      ++calls;
      comm_->reduce_scatter_add({bucket.get(), numel, dtype, {}}, {sums, part, DType::kF32, {}}, "bucket").wait();
    };
    report("reduce_scatter_add", bytes, dtype, (size_ - 1.0) / size_, 1, floor, call, [&] {
      return std::count_if(sums, sums + part, [&](float v) { return v != static_cast<float>(calls * size_); });
    });
  }

  void all_gather(std::int64_t bytes) {
    const std::int64_t part = bytes / size_;
    const Memory full = comm_->allocate(bytes), private_full = allocate_host(bytes);
    std::memset(full.get() + rank_ * part, rank_ + 1, static_cast<std::size_t>(part));
    std::memset(slice(rank_), rank_ + 1, static_cast<std::size_t>(part));
    const auto floor = [&] {
      for (int r = 0; r < size_; ++r) {
        if (r != rank_) std::memcpy(private_full.get() + r * part, slice(r), static_cast<std::size_t>(part));
      }
      meet();
    };
    const auto call = [&] { comm_->all_gather({full.get(), bytes / 4, DType::kF32, {}}, "bucket").wait(); };
    report("all_gather", bytes, DType::kF32, (size_ - 1.0) / size_, 1, floor, call, [&] {
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < bytes; ++i) wrong += full[static_cast<std::ptrdiff_t>(i)] != std::byte(i / part + 1);
      return wrong;
    });
  }

  template <class Source>
  __attribute__((target_clones("default", "avx2"))) static void add(float* __restrict__ into,
                                                                    const Source* __restrict__ a,
                                                                    const Source* __restrict__ b, std::int64_t numel,
                                                                    bool first) {
    if (first) {
      for (std::int64_t i = 0; i < numel; ++i) into[i] = to_float(a[i]) + to_float(b[i]);
    } else {
      for (std::int64_t i = 0; i < numel; ++i) into[i] += to_float(a[i]) + to_float(b[i]);
    }
  }

  std::byte* slice(int rank) const { return arena_ + rank * arena_bytes_; }

  void meet() {
    const int round = shared_->round.load();
    if (shared_->arrived.fetch_add(1) == size_ - 1) {
      shared_->arrived = 0;
      ++shared_->round;
    }
    for (int spins = 0; shared_->round.load(std::memory_order_acquire) == round; ++spins) {
      if (spins > 500) sched_yield();
    }
  }

  // Of the slowest rank.
  double seconds_of(const std::function<void()>& once) {
    meet();
    const double start = now();
    once();
    shared_->seconds[rank_] = now() - start;
    meet();
    return *std::max_element(shared_->seconds, shared_->seconds + size_);
  }

  template <class Check>
  void report(const char* name, std::int64_t bytes, DType dtype, double bus_factor, std::int64_t calls,
              const std::function<void()>& floor, const std::function<void()>& call, Check count_wrong) {
    std::vector<double> floors, times;
    for (int rep = -2; rep < reps_; ++rep) {  // the first ones touch the memory
      const double floor_time = seconds_of(floor) / static_cast<double>(calls);
      const double time = seconds_of(call) / static_cast<double>(calls);
      if (rep < 0) continue;
      floors.push_back(floor_time);
      times.push_back(time);
    }
    std::sort(floors.begin(), floors.end());
    std::sort(times.begin(), times.end());
    const double median = times[times.size() / 2], floor_median = floors[floors.size() / 2];
    std::int64_t wrong = static_cast<std::int64_t>(count_wrong());
    comm_->all_reduce({&wrong, 1}, ReduceOp::kSum, "wrong results").wait();
    if (wrong > 0) failed_ = true;
    if (rank_ != 0) return;
    const std::string operation = std::string(name) + (bytes > 0 ? std::string(", ") + zc::name(dtype) : "");
    rows_.push_back(json_row(operation, "zerocore, C++", bytes, times, bus_factor));
    rows_.push_back(json_row(operation, "floor", bytes, floors, bus_factor));
    const double rate = static_cast<double>(bytes) / median * 1e-9;
    std::printf("%12lld %12lld %-6s %-18s %10.1f %8.2f %8.2f %10.1f %6.2f %10.1f %10.1f %6.2f %6lld\n",
                static_cast<long long>(bytes), static_cast<long long>(bytes / size_bytes(dtype)), zc::name(dtype), name,
                median * 1e6, rate, rate * bus_factor, floor_median * 1e6, median / floor_median, times[0] * 1e6,
                floors[0] * 1e6, times[0] / floors[0], static_cast<long long>(wrong));
    std::fflush(stdout);
  }

  // As bench_collectives.py writes them.
  static std::string json_row(const std::string& operation, const char* library, std::int64_t bytes,
                              const std::vector<double>& seconds, double bus_factor) {
    const double median = seconds[seconds.size() / 2];
    std::ostringstream out;
    out << R"({"operation": ")" << operation << R"(", "library": ")" << library << R"(", "time_us": )" << median * 1e6;
    if (bytes > 0) {
      const double rate = static_cast<double>(bytes) / median * 1e-9;
      out << R"(, "bytes": )" << bytes << R"(, "algbw_GBps": )" << rate << R"(, "busbw_GBps": )" << rate * bus_factor;
    }
    out << R"(, "seconds": [)";
    for (std::size_t i = 0; i < seconds.size(); ++i) out << (i > 0 ? ", " : "") << seconds[i];
    out << "]}";
    return out.str();
  }

 public:
  bool failed() const { return failed_; }

  void write(const std::string& path) const {
    std::ofstream file(path);
    file << R"({"settings": {"ranks": )" << size_ << R"(}, "rows": [)";
    for (std::size_t i = 0; i < rows_.size(); ++i) file << (i > 0 ? ",\n" : "\n") << rows_[i];
    file << "\n]}\n";
    ZC_CHECK(file.flush(), kIo, "cannot write ", path);
  }

 private:
  int rank_, size_, reps_;
  Shared* shared_;
  std::byte* arena_;
  std::int64_t arena_bytes_;
  std::shared_ptr<Communicator> comm_;
  std::vector<std::string> rows_;
  bool failed_ = false;
};

void* map_shared(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

std::string text_option(int argc, char** argv, std::string_view start) {
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]).starts_with(start)) return argv[i] + start.size();
  }
  return {};
}

long option(int argc, char** argv, const char* name, long otherwise) {
  const std::string start = std::string("--") + name + "=";
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]).starts_with(start)) return std::atol(argv[i] + start.size());
  }
  return otherwise;
}

int run(int argc, char** argv) {
  const int size = static_cast<int>(option(argc, argv, "ranks", 2));
  const int reps = static_cast<int>(option(argc, argv, "reps", 15));
  const std::int64_t max_bytes = option(argc, argv, "max-mib", 256) << 20;
  if (size < 2 || size > kMaxRanks || size % 2 != 0 || reps < 1 || max_bytes < 1) {
    std::fprintf(stderr, "comm_bench: got %d ranks, expected 2, 4, 6 or 8; --reps and --max-mib: at least 1\n", size);
    return 2;
  }
  auto* shared = new (map_shared(sizeof(Shared))) Shared;
  auto* arena = static_cast<std::byte*>(map_shared(static_cast<std::size_t>(size * max_bytes)));
  int rank = 0;
  for (int other = 1; other < size && rank == 0; ++other) {
    if (fork() == 0) rank = other;
  }
  bool failed = true;
  try {
    Rank own(rank, size, reps, shared, arena, max_bytes);
    own.run(max_bytes);
    failed = own.failed();
    const std::string path = text_option(argc, argv, "--json=");
    if (rank == 0 && !path.empty()) own.write(path);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "comm_bench: rank %d: %s\n", rank, error.what());
  }
  if (rank != 0) _exit(failed ? 1 : 0);
  for (int status = 0; wait(&status) > 0;) failed = failed || status != 0;
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace zc::comm

int main(int argc, char** argv) { return zc::comm::run(argc, argv); }
